"""Comparison of two records."""

import json

import numpy as np
import pytest
import rich.console

from dllm_jax.eval import cli
from dllm_jax.eval.results.comparison import bootstrap, compare, tables
from dllm_jax.eval.results.record import read
from dllm_jax.eval.run.settings import Decoding


def record(scores: dict[str, list[float]], **changes) -> dict:
    rows = [
        {
            "group": group, "id": str(i), "score": score, "answer": str(score), "error": None,
            "question": "one", "forwards": 4, "computed": 40, "tokens": 3, "seconds": 0.5,
        }
        for group, values in scores.items()
        for i, score in enumerate(values)
    ]  # fmt: skip
    base = {
        "kind": "tasks", "requests": rows, "decoding": {"policy": "Policy()"}, "model": {"name": "m"},
        "settings": {}, "device": {}, "versions": {}, "batch": 8, "bucket": 64, "max_positions": None,
    }  # fmt: skip
    return base | changes


def test_the_interval_is_the_percentile_bootstrap_of_paired_differences():
    rng = np.random.default_rng(1)
    a, b = rng.random(50), rng.random(50)
    found = compare(record({"t": list(a)}), record({"t": list(b)}), confidence=0.9, draws=4000).scores
    assert len(found) == 1
    resampled = [np.mean(rng.choice(b - a, 50)) for _ in range(4000)]
    assert found[0].difference == pytest.approx(np.mean(b) - np.mean(a))
    assert (found[0].low, found[0].high) == pytest.approx(np.percentile(resampled, (5, 95)), abs=0.01)
    means = bootstrap(np.array([0.0, 1.0]), 1300, np.random.default_rng(0))  # in several chunks
    assert means.shape == (1300,)
    assert set(means) == {0, 0.5, 1}


def test_what_is_paired_and_averaged():
    """Pairing is narrower than the two means are wide; the average is over tasks, not over requests."""
    a = np.random.default_rng(0).random(60)
    found = compare(record({"t": list(a)}), record({"t": list(a + 0.1)})).scores[0]
    assert (found.low, found.high) == pytest.approx((0.1, 0.1))
    found = compare(record({"x": [0] * 9, "y": [0]}), record({"x": [0] * 9, "y": [1]})).scores
    assert [d.group for d in found] == ["x", "y", "average"]
    assert (found[-1].count, found[-1].a, found[-1].b, found[-1].difference) == (10, 0, 0.5, 0.5)
    assert 0.5 == found[-1].low == found[-1].high  # of the tasks' resamples, each of which is certain
    found = compare(record({"t": [1, 1, 1]}), record({"t": [1, 0], "u": [1]}))
    assert (found.scores[0].count, found.unpaired, found.same) == (2, 2, 0.5)


def test_requests_of_equal_name_but_another_question_have_no_partner():
    other = record({"t": [1, 0, 1]}, settings={"seed": 1})
    for row in other["requests"][1:]:
        row["question"] = "another"
    found = compare(record({"t": [1, 1, 1]}), other)
    assert (found.scores[0].count, found.unpaired) == (1, 4)
    other["requests"][0]["question"] = "another"
    with pytest.raises(
        ValueError, match=r"different questions: .* all 3 requests .* of t 0; settings\.seed: 0 and 1"
    ):
        compare(record({"t": [1, 1, 1]}, settings={"seed": 0}), other)


def test_differing_settings_are_named():
    other = record({"t": [1]}, decoding={"policy": "DualCache()"}, batch=2)
    found = compare(record({"t": [1]}), other)
    assert found.settings == {"decoding.policy": ("Policy()", "DualCache()"), "batch": (8, 2)}
    assert found.costs["forwards"] == (4, 4)
    console = rich.console.Console(record=True, width=120)
    for table in tables(found, ("a[1].json", "b.json"), 0.95):
        console.print(table)
    assert "DualCache()" in (text := console.export_text())
    assert "a[1].json" in text


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="A is a result of tasks, B of needle"):
        compare(record({"t": [1]}), record({"t": [1]}, kind="needle"))
    with pytest.raises(ValueError, match="no request in common"):
        compare(record({"t": [1]}), record({"u": [1]}))
    with pytest.raises(ValueError, match="confidence=1"):
        compare(record({"t": [1]}), record({"t": [1]}), confidence=1.0)


def test_a_malformed_record_is_refused_with_what_it_lacks(tmp_path):
    path = tmp_path / "tasks-Policy.json"
    options = cli.Options(decoding=Decoding(length=4, block=2), out=tmp_path)
    assert cli.run_tasks(options, "FewShot", (5,), 1) == 0
    whole = read(path)
    row = whole["requests"][0]
    for change, reason in (
        ({"requests": [1]}, r"tasks-Policy\.json: requests\[0\] is no object"),
        ({"requests": [{"id": "0"}]}, r"requests\[0\] lacks 'key'"),
        ({"requests": [row | {"score": "x"}]}, r"requests\[0\]: score='x' is no float"),
        ({"requests": [{k: v for k, v in row.items() if k != "cold"}]}, r"requests\[0\] lacks 'cold'"),
        ({"requests": {}}, r"requests=\{\} is no list"),
        ({"decoding": None}, "decoding=None is no dict"),
        ({"format": 1}, "is not a result of dllm_jax.eval, format 3"),
        ({"lm_eval_version": "0.4.13"}, r"tasks-Policy\.json is a result of lm_eval"),
    ):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(ValueError, match=reason):
            read(path)
