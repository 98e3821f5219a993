"""`python -m dllm_jax` as a user runs it."""

import json
import subprocess
import sys

import numpy as np

from dllm_jax.demo.show import order


def test_the_demonstration_answers_and_measures(tmp_path):
    report = tmp_path / "table.json"
    command = [sys.executable, "-m", "dllm_jax", "--models", "tiny-dream", "--prompts", "4"]
    run = subprocess.run([*command, "--json", str(report)], capture_output=True, text=True)
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
    assert "prompts=0 must be at least 1" in run.stderr


def test_order_is_the_step_of_decoding():
    tokens = np.array([[9, 9, 9], [9, 4, 9], [5, 4, 9], [5, 4, 6]])
    np.testing.assert_array_equal(order(tokens, mask_id=9), [2, 1, 3])
