"""Parts of parameters where they are stored and where they are loaded to: bytes, pieces, every leaf."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dllm_jax as dj
from convert.verify import verify
from dllm_jax.checkpoint import convert, save_hf
from dllm_jax.checkpoint.converted import piece
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.sharded import Stored, whole_array
from dllm_jax.checkpoint.source import open_checkpoint, opened, read_checkpoint
from dllm_jax.nn import parameters
from dllm_jax.nn.int8 import Int8Matrix, placements
from dllm_jax.nn.sharding import AXES, OUTPUTS, leaves, sharding
from tests.checkpoints import tiny, write_hf

WIDE = {"width": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, "mlp_width": 256, "vocab": 512, "layers": 1}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """The same weights as they are kept: at Hugging Face, converted, and in int8."""
    root = tmp_path_factory.mktemp("stored")
    hf = write_hf(root / "hf", tiny("dream", **WIDE | {"kv_heads": 4}))
    int8 = convert(hf, root / "int8", weights="int8")
    return {"hf": hf, "converted": convert(hf, root / "jax"), "int8": int8}


@pytest.mark.parametrize("kind", ["hf", "converted", "int8"])
def test_any_part_is_that_of_the_whole(places, kind):
    source, rng = open_checkpoint(places[kind]), np.random.default_rng(0)
    reference = open_checkpoint(places["int8" if kind == "int8" else "hf"])
    parts = 0
    for unit in units_of(source.spec):
        for leaf, parameter in source.parameters(unit).items():
            full = read_checkpoint(reference, unit)[leaf]
            pairs = [(parameter, full)]
            if isinstance(parameter, Int8Matrix):
                pairs = [(parameter.values, full.values), (parameter.scale, full.scale)]
            for stored, array in pairs:
                assert stored.shape == array.shape
                for _ in range(8):
                    ends = [np.sort(rng.choice(length + 1, 2, replace=False)) for length in array.shape]
                    ranges = tuple(slice(int(start), int(stop)) for start, stop in ends)
                    np.testing.assert_array_equal(stored.read(ranges), array[ranges])
                    parts += 1
    assert parts > 100


@pytest.mark.parametrize("kind", ["hf", "converted"])
def test_a_part_of_an_int8_matrix_is_that_of_the_whole_one(places, kind):
    source, dtype = open_checkpoint(places[kind]), np.dtype(np.float32)
    for _, held in opened(source, dtype, "int8"):
        for leaf, parameter in held.items():
            if not isinstance(parameter, Int8Matrix):
                continue
            full = whole_array({leaf: parameter})[leaf]
            half = tuple(slice(length // 4, length // 2) for length in full.shape)
            np.testing.assert_array_equal(parameter.values.read(half), full.values[half])
            half = tuple(slice(length // 4, length // 2) for length in full.scale.shape)
            np.testing.assert_array_equal(parameter.scale.read(half), full.scale[half])


def test_devices_that_hold_the_same_part_read_it_once():
    mesh, asked = Mesh(np.reshape(jax.devices()[:8], (2, 4)), ("dp", "tp")), []
    numbers = np.arange(64.0, dtype=np.float32).reshape(8, 8)

    def part(ranges):
        asked.append(ranges)
        return numbers[ranges]

    where = NamedSharding(mesh, PartitionSpec(None, "tp"))
    placed = Stored((8, 8), np.dtype(np.float32), part).on_devices(where)
    np.testing.assert_array_equal(placed, numbers)
    assert sorted(columns.start for _, columns in asked) == [0, 2, 4, 6]


def test_arrays_are_cut_where_meshes_split_them():
    for axes, shape, expected in (
        ("mhd", (4096, 32, 128), (512, 1, 128)),  # LLaDA-8B: heads, and the width for fsdp
        ("mf", (4096, 12288), (512, 384)), ("vm", (126464, 4096), (3952, 512)),
        ("mhd", (3584, 28, 128), (448, 1, 128)), ("mkd", (3584, 4, 128), (448, 1, 128)),  # Dream-7B
        ("m", (4096,), (4096,)), ("mf", (32, 48), (32, 48)), ("vm", (127, 4096), (127, 512)),  # small: whole
    ):  # fmt: skip
        assert piece(axes, shape, 2) == expected, shape


@pytest.mark.parametrize("over", [None, (8,)])
def test_saving_keeps_nothing_of_the_model_on_the_host(places, tmp_path, over):
    model = dj.load(places["hf"], mesh=None if over is None else jax.make_mesh(over, ("fsdp",)))
    saved = save_hf(model, tmp_path / "saved")
    assert verify(places["hf"], saved, tokens=0).identical
    assert all(array._npy_value is None for array in jax.tree.leaves(model.params))  # JAX's copy of the host


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
    axes, names = repr(model).rpartition("  mesh    ")[2].split("; split over it: ")
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
        for name in (name for name in OUTPUTS if name in leaves(model.spec)):
            leaf, n = (model.params[name], "") if name == "head" else (layer[name], "n" * (not apart))
            assert_placed(leaf.values, sharding(model.spec, n + AXES[name].removeprefix("n"), mesh))
            assert_placed(leaf.scale, sharding(model.spec, n + OUTPUTS[name], mesh))
            kinds.add(tuple(array.sharding.is_fully_replicated for array in (leaf.values, leaf.scale)))
        tokens = jnp.asarray(PROMPT)
        np.testing.assert_allclose(dj.forward(model, tokens), dj.forward(alone, tokens), atol=1e-4)
    assert kinds == {(False, False), (False, True), (True, True)}  # up; down; k, of 2 heads


def test_matrices_of_separate_layers_have_one_order_on_tpus():
    """Heads first, and all others as named; other layers, and other platforms, have no order of their own."""
    of = lambda name, leaf, platform="tpu": placements(
        dj.presets.model_spec(name).at(0), leaf, None, None, platform, stacked=False
    )
    orders = {leaf: of("diffusiongemma-26b-a4b", leaf) for leaf in ("q", "expert_gate", "soft_up", "embed")}
    assert {leaf: where and where.layout.major_to_minor for leaf, where in orders.items()} == {
        "q": (1, 0, 2), "expert_gate": (0, 1, 2), "soft_up": (0, 1), "embed": None,
    }  # fmt: skip
    assert of("llada-8b", "q") is None
    assert of("diffusiongemma-26b-a4b", "q", "cuda") is None
    values = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    stored = Stored(values.shape, values.dtype, lambda index: values[index])
    assert np.array_equal(stored.on_devices(orders["q"]), values)
