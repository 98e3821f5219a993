"""Tensor-parallel loading: every leaf is where the table says, in both forms and in int8."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.checkpoint import convert
from dllm_jax.nn import parameters
from dllm_jax.nn.sharding import AXES, OUTPUTS, leaves, sharding
from tests.checkpoints import tiny, write_hf

TP, BOTH, DATA = ((4,), ("tp",)), ((2, 2), ("dp", "tp")), ((4,), ("dp",))
PROMPT = np.arange(10).reshape(2, 5)


def on(shape, names) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, devices=jax.devices()[:4])


def assert_placed(array: jax.Array, where: jax.sharding.Sharding):
    assert array.sharding.is_equivalent_to(where, array.ndim), (array.sharding, where)


@pytest.mark.parametrize(
    ("family", "converted", "layout"),
    [("llada", False, DATA), ("dream", False, BOTH), ("dream", False, TP), ("llada", True, BOTH)],
    ids=str,
)
def test_every_leaf_is_where_the_table_says(tmp_path, family, converted, layout):
    path, mesh = write_hf(tmp_path / "hf", tiny(family)), on(*layout)
    path = convert(path, tmp_path / "jax") if converted else path
    alone = dj.load(path, separate_layers=False)
    model = dj.load(path, mesh=mesh, separate_layers=False)
    named = {at[-1].key: leaf for at, leaf in jax.tree.leaves_with_path(model.params)}
    assert sorted(named) == sorted(leaves(model.spec))
    for name, leaf in named.items():
        assert_placed(leaf, sharding(model.spec, AXES[name], mesh))
    ways = mesh.shape.get("tp", 1)
    layers, local = model.params["layers"], lambda leaf: leaf.addressable_shards[0].data.shape
    assert local(model.params["embed"]) == (64 // ways, 32)
    assert local(layers["q"]) == (3, 32, 4 // ways, 8)
    kv = model.spec.kv_heads
    assert local(layers["k"]) == (3, 32, kv if kv % ways else kv // ways, 8)
    assert local(layers["down"]) == (3, 48 // ways, 32)
    assert local(layers["mlp_norm"]) == (3, 32)
    chex.assert_trees_all_equal(alone.params, model.params, strict=True)
    separate = dj.load(path, mesh=mesh, separate_layers=True)
    for layer in separate.params["layers"]:
        for name, leaf in layer.items():
            assert_placed(leaf, sharding(model.spec, AXES[name].removeprefix("n"), mesh))
    chex.assert_trees_all_equal(parameters.stacked(separate.params), model.params)

    # What is printed of it.
    split = [name for name, leaf in named.items() if not leaf.sharding.is_fully_replicated]
    (line,) = (line for line in repr(model).splitlines() if "mesh " in line)
    axes, names = line.removeprefix("  mesh    ").split("; split over it: ")
    assert axes == ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    assert sorted(names.split(", ")) == sorted(split or ["nothing"])
    assert "mesh" not in repr(alone)


def test_values_of_int8_lie_as_the_matrix_and_scales_as_its_outputs(tmp_path):
    dream = write_hf(tmp_path / "dream", tiny("dream"))
    alone, kinds = dj.load(dream, weights="int8"), set()
    for apart, layout in ((False, BOTH), (True, TP)):
        mesh = on(*layout)
        model = dj.load(dream, mesh=mesh, separate_layers=apart, weights="int8")
        chex.assert_trees_all_equal(parameters.stacked(alone.params), parameters.stacked(model.params))
        described = dj.abstract(dream, mesh=mesh, separate_layers=apart, weights="int8").params
        jax.tree.map(lambda a, b: assert_placed(a, b.sharding), model.params, described)
        layer = model.params["layers"][0] if apart else model.params["layers"]
        for name in OUTPUTS:
            leaf, n = (model.params[name], "") if name == "head" else (layer[name], "n" * (not apart))
            assert_placed(leaf.values, sharding(model.spec, n + AXES[name].removeprefix("n"), mesh))
            assert_placed(leaf.scale, sharding(model.spec, n + OUTPUTS[name], mesh))
            kinds.add(tuple(array.sharding.is_fully_replicated for array in (leaf.values, leaf.scale)))
        tokens = jnp.asarray(PROMPT)
        np.testing.assert_allclose(dj.forward(model, tokens), dj.forward(alone, tokens), atol=1e-4)
    assert kinds == {(False, False), (False, True), (True, True)}  # up; down; k, of 2 heads
