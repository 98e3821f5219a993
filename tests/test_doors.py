"""Functions refuse arguments of another kind at the door, by name, whatever calls them."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import lora, tasks
from dllm_jax.nn import parameters
from dllm_jax.options import shown
from dllm_jax.testing import models
from tests import refuses


def lacking(name: str) -> dj.Model:
    """A model of a family that lacks what this family has."""
    spec = dataclasses.replace(models.spec("sdar"), family=name, experts=None)
    made = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), parameters.abstract(spec))
    return dj.Model(made, spec)


def calls(tmp_path) -> dict[str, Any]:
    """Calls by what their messages begin with."""
    path = dj.bundled.path("tiny-llada")
    model, tokenizer = dj.load(path), dj.load_tokenizer(path)
    run = dj.generate(model, [[7, 8, 9]], length=2, block=2, steps=1, trace=True)
    answers = functools.partial(dj.decode_answers, model, tokenizer)
    attach = functools.partial(lora.attach, model, lora.LoRA(), jax.random.key(0))
    chat = functools.partial(dj.chat, model, tokenizer, [{"role": "user", "content": "T="}], length=4)
    save, kept = functools.partial(dj.save_hf, model, tmp_path / "x"), lora.save
    export = lambda family: dj.save_hf(lacking(family), tmp_path / "z")
    bad_responses = (3, None, "1", [["a"]], [[-1]], [[7.5]], [[10**6]], [[True]])
    named = {f"responses={shown(bad)} must be a batch of token ids": bad for bad in bad_responses}
    return {message: functools.partial(answers, bad) for message, bad in named.items()} | {
        "stops=['1'] must be a StopTexts": lambda: answers([[7]], ["1"]),
        "sequence='0' must be a whole number": lambda: dj.show(run, tokenizer, sequence="0"),
        "sequence=0.0 must be": lambda: run.to_html(tokenizer, sequence=0.0),
        "sequence=True must be": lambda: run.to_html(tokenizer, sequence=True),
        "sequence=-1 must be 0 to 0": lambda: run.to_html(tokenizer, sequence=-1),
        "console=3 must be": lambda: dj.show(run, tokenizer, console=3),
        "prompt_mask has shape (1, 4)": lambda: dj.capture(model, [[7, 8, 9]], prompt_mask=[[1] * 4]),
        "source must be an Output": lambda: dj.capture(model, 3),
        "items=3 must be several": lambda: dj.Journal(None).left(3),
        "asked='x' must be": lambda: dj.Journal(None).answer("x", "y"),
        "error=3 must be": lambda: dj.Journal(None).fail(dj.Journal(None).left(["a"])[0], 3),
        "dtype='float3' is no dtype": lambda: attach(dtype="float3"),
        "dtype=int8 is not supported": lambda: attach(dtype="int8"),
        "dtype=0 is no dtype": lambda: attach(dtype=0),
        "base=3 must be": lambda: kept(attach(), tmp_path / "y", base=3),
        "enable_thinking='no' must be True or False": lambda: chat(enable_thinking="no"),
        "stop=np.uint8(3) must be a list of texts": lambda: chat(stop=np.uint8(3)),
        "stop={'a': 1} must be a list of texts": lambda: chat(stop={"a": 1}),
        "tokenizer=3 must be": lambda: dj.StopTexts(3, ["x"]),
        "ids='x' must be token ids": lambda: dj.StopTexts(tokenizer, ["x"]).decode("x"),
        "tokenizer='x' must be": lambda: dj.delimiters("x"),
        "directions has shape (2,)": lambda: dj.policies.ValueProxy([1, 2]),
        "experts=None is not supported by sdar_moe": lambda: export("sdar-moe"),
        "vision=None is not supported by family='llada-v'": lambda: dj.save_hf(
            lacking("llada-v"), tmp_path / "z"
        ),
        "model=3 must be": lambda: dj.save_hf(3, tmp_path / "z"),
        "overwrite='yes' must be": lambda: save(overwrite="yes"),
        "shard_bytes=0 must be": lambda: save(shard_bytes=0),
        "like=3 must be": lambda: save(like=3),
        "spec='x' must be": lambda: tasks.encode_batch(tokenizer, [("a", "b")], 4, "x"),
        "length=0 must be": lambda: tasks.encode_batch(tokenizer, [("a", "b")], 0, model.spec),
        "examples=[] must hold": lambda: tasks.encode_batch(tokenizer, [], 4, model.spec),
        "examples=['a'] must be": lambda: tasks.prompt_arrays(tokenizer, ["a"], model.spec),
        "task=3 must be": lambda: tasks.examples(3, 0, 2, 1, "train"),
        "count=-1 must be": lambda: tasks.examples(tasks.Chain(), 0, 2, -1, "train"),
        "seed=1.5 must be": lambda: tasks.examples(tasks.Chain(), 1.5, 2, 1, "train"),
    }


def test_arguments_of_all_doors_are_refused_by_name(tmp_path):
    for message, call in calls(tmp_path).items():
        refuses(f"^{re.escape(message)}", call)
    with pytest.raises(TypeError, match="'directions'"):
        dj.policies.ValueProxy()
