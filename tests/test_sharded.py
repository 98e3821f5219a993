"""Parts of parameters where they are stored: which bytes hold them, and how directories are cut."""

import json
import os
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dllm_jax as dj
from convert.verify import verify
from dllm_jax.checkpoint import arrays, convert, save_hf
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.sharded import Stored, whole
from dllm_jax.checkpoint.source import open_checkpoint, opened, read
from dllm_jax.nn.int8 import Int8Matrix
from tests.checkpoints import tiny, write_hf

WIDE = {"width": 64, "heads": 8, "kv_heads": 8, "head": 8, "hidden": 256, "vocab": 512, "layers": 1}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """The same weights as they are kept: at Hugging Face, converted, and by Orbax in format 1."""
    root = tmp_path_factory.mktemp("stored")
    hf = write_hf(root / "hf", tiny("dream", **WIDE | {"kv_heads": 4}))
    found = {
        "hf": hf,
        "converted": convert(hf, root / "jax"),
        "int8": convert(hf, root / "int8", weights="int8"),
    }
    return found | {"orbax": of_an_earlier_release(found["converted"], root / "orbax")}


def of_an_earlier_release(directory: Path, target: Path) -> Path:
    """A converted directory as releases up to format 2 wrote it."""
    checkpoint = open_checkpoint(directory)
    for unit in units_of(checkpoint.spec):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            parts = lambda a: {"values": a.values, "scale": a.scale} if isinstance(a, Int8Matrix) else a
            nested = {leaf: parts(array) for leaf, array in read(checkpoint, unit).items()}
            checkpointer.save(target / "params" / unit.name, args=ocp.args.PyTreeSave(nested))
    written = json.loads((directory / "spec.json").read_text())
    (target / "spec.json").write_text(json.dumps(written | {"format": written["format"] - 2}))
    return target


@pytest.mark.parametrize("kind", ["hf", "converted", "orbax", "int8"])
def test_any_part_is_that_of_the_whole(places, kind):
    source, rng = open_checkpoint(places[kind]), np.random.default_rng(0)
    reference = open_checkpoint(places["int8" if kind == "int8" else "hf"])
    parts = 0
    for unit in units_of(source.spec):
        for leaf, parameter in source.parameters(unit).items():
            full = read(reference, unit)[leaf]
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
    for _, parameters in opened(source, dtype, "int8"):
        for leaf, parameter in parameters.items():
            if not isinstance(parameter, Int8Matrix):
                continue
            full = whole({leaf: parameter})[leaf]
            half = tuple(slice(length // 4, length // 2) for length in full.shape)
            np.testing.assert_array_equal(parameter.values.read(half), full.values[half])
            half = tuple(slice(length // 4, length // 2) for length in full.scale.shape)
            np.testing.assert_array_equal(parameter.scale.read(half), full.scale[half])


@pytest.mark.parametrize("weights", [None, "int8"])
def test_directories_of_earlier_releases_load(tmp_path, places, weights):
    directory = places["converted" if weights is None else "int8"]
    old = of_an_earlier_release(directory, tmp_path / "old")
    assert json.loads((old / "spec.json").read_text())["format"] == (1 if weights is None else 2)
    assert verify(old, directory, tokens=0).identical


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


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        ("mhd", (4096, 32, 128), (512, 1, 128)),  # LLaDA-8B: heads, and the width for fsdp
        ("mf", (4096, 12288), (512, 384)),
        ("vm", (126464, 4096), (3952, 512)),
        ("mhd", (3584, 28, 128), (448, 1, 128)),  # Dream-7B
        ("mkd", (3584, 4, 128), (448, 1, 128)),
        ("m", (4096,), (4096,)),
        ("mf", (32, 48), (32, 48)),  # what is small stays whole
        ("vm", (127, 4096), (127, 512)),
    ],
)
def test_arrays_are_cut_where_meshes_split_them(axes, shape, expected):
    assert arrays.piece(axes, shape, 2) == expected


def test_a_part_of_a_converted_directory_reads_its_own_pieces(tmp_path):
    if not os.path.exists("/proc/self/io"):
        pytest.skip("bytes that a process reads are counted by Linux")
    hf = write_hf(tmp_path / "hf", tiny(**WIDE | {"width": 512, "hidden": 2048, "head": 64}))
    source = open_checkpoint(convert(hf, tmp_path / "jax"))
    (layer,) = (unit for unit in units_of(source.spec) if unit.layer == 0)
    gate = source.parameters(layer)["gate"]  # [512 2048] float32: 4 MiB
    before = bytes_read()
    gate.read((slice(0, 512), slice(256, 512)))
    eighth = bytes_read() - before
    assert 0.4 * 2**20 < eighth < 0.6 * 2**20


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("over", [None, (8,)])
def test_saving_keeps_nothing_of_the_model_on_the_host(places, tmp_path, over):
    model = dj.load(places["hf"], mesh=None if over is None else jax.make_mesh(over, ("fsdp",)))
    saved = save_hf(model, tmp_path / "saved")
    assert verify(places["hf"], saved, tokens=0).identical
    assert all(array._npy_value is None for array in jax.tree.leaves(model.params))  # JAX's copy of the host
