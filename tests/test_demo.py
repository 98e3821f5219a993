"""`python -m dllm_jax` as a user runs it."""

import json
import os
import subprocess
import sys

import numpy as np
from transformers import AutoTokenizer

from dllm_jax import embedded
from dllm_jax.demo.show import END, grid, order
from dllm_jax.tasks import tokenizer
from tests.conftest import CACHE


def test_the_demonstration_answers_and_measures(tmp_path):
    report = tmp_path / "table.json"
    command = [sys.executable, "-m", "dllm_jax", "--models", "tiny-dream", "--prompts", "4"]
    cheaply = os.environ | {  # as conftest.py does for other tests
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
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


def test_order_is_the_step_of_decoding():
    tokens = np.array([[9, 9, 9], [9, 4, 9], [5, 4, 9], [5, 4, 6]])
    np.testing.assert_array_equal(order(tokens, mask_id=9), [2, 1, 3])


def test_a_step_of_a_chain_fits_a_line_of_a_terminal():
    read = AutoTokenizer.from_pretrained(embedded.path("tiny-llada"))
    mask, end = (read.convert_tokens_to_ids(name) for name in (tokenizer.MASK, tokenizer.EOT))
    answer = [*read.encode("b>c;" * 7, add_special_tokens=False), *[end] * 4]
    lines = str(grid(np.array([[mask] * 32, answer]), mask, read)).splitlines()
    assert [len(line) <= 80 for line in lines] == [True, True]
    assert lines[-1].split()[-4:] == [END] * 4
