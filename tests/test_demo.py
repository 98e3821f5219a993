"""`python -m dllm_jax` as a user runs it."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dllm_jax.__main__ import Arguments
from tests.conftest import CACHE


def test_the_demonstration_answers_and_measures(tmp_path):
    report = tmp_path / "table.json"
    command = [sys.executable, "-m", "dllm_jax", "--models", "tiny-dream", "--prompts", "4"]
    cheaply = os.environ | {  # as conftest.py does for other tests
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    run = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True, env=cheaply)
    assert run.returncode == 0, run.stderr
    tables = json.loads(report.read_text())["tables"]
    assert [table["model"] for table in tables] == ["tiny-dream"] * 2
    for table in tables:
        exact, prefix, dual, threshold = table["rows"]
        assert (exact["policy"], exact["sampler"]) == ("Policy()", "Confidence()")
        assert exact["speed_up"] == 1.0
        assert exact["forwards"] <= table["length"]
        assert exact["computed"] > prefix["computed"] > dual["computed"]
        assert threshold["forwards"] <= dual["forwards"]
    assert np.mean([table["rows"][0]["accuracy"] for table in tables]) >= 0.7


def test_bad_options_are_refused():
    run = subprocess.run([sys.executable, "-m", "dllm_jax", "--prompts", "0"], capture_output=True, text=True)
    assert run.returncode != 0
    assert "prompts=0 must be a whole number of at least 1" in run.stderr


def test_checkpoints_that_read_no_text_are_left_out():
    assert Arguments().models == ("tiny-llada", "tiny-dream")
    with pytest.raises(ValueError, match="models='tiny-llada-v' must be of tiny-llada, tiny-dream"):
        Arguments(models=("tiny-dream", "tiny-llada-v"))
