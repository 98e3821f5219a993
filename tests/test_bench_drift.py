"""bench.drift: similarity of keys and values between adjacent denoising steps, of embedded models."""

import json

import pytest

from bench import drift
from dllm_jax.analysis import KINDS


def test_a_line_per_layer(tmp_path):
    path = tmp_path / "found.json"
    drift.main(("tiny-llada",), ("few-shot",), prompts=2, json=path)
    rows = json.loads(path.read_text())["rows"]
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    assert set(rows[0]["k"]) == set(drift.KINDS)
    with pytest.raises(SystemExit, match="--tasks poems: not among chain"):
        drift.main(tasks=("poems",))


def test_the_kinds_are_those_of_the_library():
    assert [name.replace("just_decoded", "new") for name in KINDS] == list(drift.KINDS)
