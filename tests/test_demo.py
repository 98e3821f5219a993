"""`python -m dllm_jax` as a user runs it."""

import json
import subprocess
import sys

import numpy as np

from dllm_jax.demo.show import order


def test_the_demonstration_answers_and_measures(tmp_path):
    report = tmp_path / "table.json"
    command = [sys.executable, "-m", "dllm_jax", "--prompts", "10", "--json", str(report)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    table = json.loads(report.read_text())
    rows = {(row["policy"], row["sampler"]): row for row in table["rows"]}
    assert len(rows) == 6
    exact = rows["Policy()", "Confidence()"]
    assert exact["accuracy"] >= 0.8
    assert exact["forwards"] == table["length"]
    assert exact["speed_up"] == 1.0
    for sampler in ("Confidence()", "Threshold(threshold=0.9)"):
        computed = [rows[p, sampler]["computed"] for p in ("Policy()", "PrefixCache()", "DualCache()")]
        assert computed[0] >= computed[1] >= computed[2]
    cached = rows["DualCache()", "Confidence()"]
    assert cached["computed"] < exact["computed"]
    assert rows["Policy()", "Threshold(threshold=0.9)"]["forwards"] < exact["forwards"]


def test_bad_options_are_refused():
    run = subprocess.run([sys.executable, "-m", "dllm_jax", "--prompts", "0"], capture_output=True, text=True)
    assert run.returncode != 0
    assert "prompts=0 must be at least 1" in run.stderr


def test_order_is_the_step_of_decoding():
    tokens = np.array([[9, 9, 9], [9, 4, 9], [5, 4, 9], [5, 4, 6]])
    np.testing.assert_array_equal(order(tokens, mask_id=9), [2, 1, 3])
