"""Shapes, counts and initial values of the parameters."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.nn import sharding
from dllm_jax.nn.modules import INIT_STD, initialize
from dllm_jax.nn.parameters import abstract, count, describe
from tests.models import spec, tiny

drawn = jax.jit(initialize, static_argnums=0)


DEEP = spec("dream", layers=8, width=64)


def test_initialize_makes_what_abstract_describes():
    made, shapes = drawn(DEEP, jax.random.key(0)), abstract(DEEP)
    chex.assert_trees_all_equal_shapes_and_dtypes(made, shapes)
    assert count(made) == count(shapes)


def test_initial_values():
    layers = drawn(DEEP, jax.random.key(0))["layers"]
    for name in ("q", "k", "v", "gate", "up"):
        assert np.std(layers[name]) == pytest.approx(INIT_STD, rel=0.05)
    for name in ("o", "down"):  # smaller with depth
        assert np.std(layers[name]) == pytest.approx(INIT_STD / 4, rel=0.05)
    assert (layers["attn_norm"] == 1).all()
    assert (layers["q_bias"] == 0).all()
    assert not np.array_equal(layers["q"][0], layers["q"][1])  # layers differ


def test_a_tied_head_is_the_embedding():
    tied = tiny("llada", tied=True)
    tokens = jnp.asarray([[1, 2, 3]], jnp.int32)
    untied = dj.Model({**tied.params, "head": tied.params["embed"]}, spec("llada"))
    np.testing.assert_array_equal(dj.forward(tied, tokens), dj.forward(untied, tokens))


PRINTED = """\
Model(llada, {size} parameters, {dtype})
  embed   [v m]
  layers  attn_norm [n m], q [n m h d], k [n m k d], v [n m k d], o [n h d m], mlp_norm [n m], \
gate [n m f], up [n m f], down [n f m]
  norm    [m]
  head    [v m]"""


def printed(params) -> str:
    lengths = sharding.sizes(spec("llada"))
    shapes = re.sub(r"\[(.*?)\]", lambda m: f"[{' '.join(str(lengths[a]) for a in m[1].split())}]", PRINTED)
    return shapes.format(size=f"{count(params):,}", dtype=params["embed"].dtype)


def test_a_model_prints_a_line_per_group_of_parameters():
    model = tiny("llada")
    assert repr(model) == printed(model.params)
    assert (
        repr(dataclasses.replace(model, implementation="xla"))
        == printed(model.params) + "\n  attention and eviction by xla"
    )
    assert len(repr(tiny("dream", tied=True)).splitlines()) == 4
    assert re.search(r"q_bias \[\d+ \d+ \d+\], k_bias", repr(tiny("dream")))
    mixed = dataclasses.replace(model, params=model.params | {"norm": jnp.ones(32, jnp.bfloat16)})
    assert "parameters, bfloat16, float32)" in repr(mixed)


def test_models_without_values_print_alike():
    described = spec("llada")
    shapes = abstract(described, jnp.bfloat16)
    assert repr(dj.Model(shapes, described)) == printed(shapes)
    traced = []
    jax.eval_shape(lambda model: traced.append(repr(model)), model := tiny("llada"))
    assert traced == [printed(model.params)]
    axes = jax.tree.map(lambda _: None, model)  # as in vmap(in_axes=...): no arrays at all
    assert repr(axes).startswith("Model(llada, 0 parameters, no dtype)\n  embed   None\n")
    assert repr(dj.Model({}, described)) == "Model(llada, 0 parameters, no dtype)"
    assert describe(0) == ["params=0"]
