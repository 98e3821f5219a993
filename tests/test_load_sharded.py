"""Tensor-parallel loading on four virtual devices, in a process of its own."""

import subprocess
import sys
from pathlib import Path

from dllm_jax.checkpoint import convert
from tests.checkpoints import tiny, write_hf

PROGRAM = """
import sys
import chex
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import dllm_jax as dj
from dllm_jax.nn.sharding import AXES, leaves, sharding

prompt = np.arange(10).reshape(2, 5)
llada, dream, converted = sys.argv[1:]
TP, BOTH, DATA = ((4,), ("tp",)), ((2, 2), ("dp", "tp")), ((4,), ("dp",))
decode = lambda model: np.asarray(dj.generate(model, prompt, length=4, block=2, steps=4).tokens)
same = lambda a, b: np.array_equal(np.asarray(a), np.asarray(b))


def check(path, alone, mesh):
    model = dj.load(path, mesh=mesh, separate_layers=False)
    named = {at[-1].key: leaf for at, leaf in jax.tree.leaves_with_path(model.params)}
    assert sorted(named) == sorted(leaves(model.spec))
    for name, leaf in named.items():
        where = sharding(model.spec, AXES[name], mesh)
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim), (name, leaf.sharding, where)
    ways = mesh.shape.get("tp", 1)
    layers, local = model.params["layers"], lambda leaf: leaf.addressable_shards[0].data.shape
    assert local(model.params["embed"]) == (64 // ways, 32)
    assert local(layers["q"]) == (3, 32, 4 // ways, 8)
    kv = model.spec.kv_heads
    assert local(layers["k"]) == (3, 32, kv if kv % ways else kv // ways, 8)
    assert local(layers["down"]) == (3, 48 // ways, 32)
    assert local(layers["mlp_norm"]) == (3, 32)
    chex.assert_trees_all_equal(alone.params, model.params, strict=True)
    split = [name for name, leaf in named.items() if not leaf.sharding.is_fully_replicated]
    (line,) = (line for line in repr(model).splitlines() if "mesh " in line)
    axes, names = line.removeprefix("  mesh    ").split("; split over it: ")
    assert axes == ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    assert sorted(names.split(", ")) == sorted(split or ["nothing"]), (names, split)
    assert "mesh" not in repr(alone)
    return model


for path, meshes in ((llada, (DATA, BOTH)), (dream, (BOTH, TP)), (converted, (BOTH,))):
    alone = dj.load(path, separate_layers=False)
    for mesh in meshes:
        model = check(path, alone, jax.make_mesh(*mesh))
        print(path, mesh)
    if path != converted:
        assert same(decode(alone), decode(model))
        separate = dj.load(path, mesh=jax.make_mesh(*mesh), separate_layers=True)
        for layer, at in ((layer, at) for layer in separate.params["layers"] for at in layer):
            where = sharding(model.spec, AXES[at].removeprefix("n"), jax.make_mesh(*mesh))
            assert layer[at].sharding.is_equivalent_to(where, layer[at].ndim), (at, layer[at].sharding)
        assert same(decode(alone), decode(separate))
"""


def test_every_leaf_is_where_the_table_says_and_decodes_the_same(tmp_path):
    llada, dream = write_hf(tmp_path / "llada", tiny()), write_hf(tmp_path / "dream", tiny("dream"))
    paths = [str(llada), str(dream), str(convert(llada, tmp_path / "jax"))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *paths],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
