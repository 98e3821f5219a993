"""The examples of learning run for a few steps, and so does the page about them."""

import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import lora
from examples import dpo, grpo, sft_lora
from examples.learning import pretrained
from tests.checkpoints import tiny as tiny_spec
from tests.checkpoints import write_hf

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "how-to" / "learning.md"
FEW = {
    "sft": (sft_lora.main, dict(steps=2, batch=4, rank=2, review_every=1, questions=4)),
    "dpo": (dpo.main, dict(steps=2, batch=2, rank=2, review_every=1, questions=4)),
    "grpo": (grpo.main, dict(steps=2, prompts=2, group=2, updates=1, rank=2, review_every=1, questions=4)),
}


@pytest.mark.parametrize("name", FEW)
def test_an_example_runs_and_writes_its_curve(name, tmp_path, capsys):
    main, options = FEW[name]
    if name == "sft":
        options = options | {"adapter": tmp_path / "adapter"}
    curve = main(**options, out=tmp_path / "results" / "curve.json")
    written = json.loads((tmp_path / "results" / "curve.json").read_text())
    assert [row["step"] for row in written["curve"]] == [0, 1, 2]
    assert written["curve"] == curve.rows
    assert all(0 <= row["accuracy"] <= 1 for row in curve.rows)
    assert {"command", "device", "versions", "date", "options"} <= set(written)
    assert len(capsys.readouterr().out.splitlines()) == 3
    if name == "sft":
        model, _ = pretrained("tiny-llada")
        assert lora.options_of(lora.load(model, tmp_path / "adapter")).rank == 2
    if name == "dpo":
        assert curve.rows[-1]["loss"] > 0


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_hf(tmp_path / "hf", tiny_spec())
    rng = np.random.default_rng(0)
    ids = lambda width: jnp.asarray(rng.integers(1, 20, (2, width)), jnp.int32)
    namespace = {"prompts": [ids(6)] * 2, "answers": [ids(4)] * 2, "prompt": ids(6), "answer": ids(4)}
    text = "\x00".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    for old, new in {
        'dj.load("GSAI-ML/LLaDA-8B-Instruct")': f"dj.load({str(path)!r})",
        "=1000": "=2",
    }.items():
        assert old in text
        text = text.replace(old, new)
    for block in text.split("\x00"):
        exec(block, namespace)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert namespace["policy"].shape == namespace["counted"].shape == (2, 4)
