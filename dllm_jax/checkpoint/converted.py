"""The converted directory: the arrays of each unit in a directory of their own, and spec.json.

    spec.json         format number, dtype and the fields of ModelSpec; "weights": "int8" in format 4
    provenance.json   what it was made from, and hashes of what was written
    params/UNIT/      parameters of the embedding, a layer, the norm or the head, in our layout
    carried.safetensors  tensors that no parameter is made of, as they came; absent if there are none
    config.json, tokenizer files, ...  kept as they came

Format 4 is that of int8 matrices: such a parameter is two arrays, LEAF.values and LEAF.scale
(`dllm_jax.nn.int8`), and dtype is that of all others. A whole
model is never in memory at once.

Arrays are zarr by way of TensorStore, in pieces that the processes of a mesh read apart. The pieces of all
arrays of a unit share a few files (OCDBT, TensorStore's key-value store), as in Orbax checkpoints. Orbax
itself cuts arrays by size alone, along their longest axis: a process that needs some of the heads would have
to read every piece.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from dllm_jax.checkpoint.config import Requirement, read_config
from dllm_jax.checkpoint.dtypes import SAFETENSORS, SUPPORTED
from dllm_jax.checkpoint.families import family_of, units_of
from dllm_jax.checkpoint.files import CARRIED, PARAMS, SPEC, check_tree, named, write_object
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import Unit, layers_in_all
from dllm_jax.checkpoint.sharded import Ranges, Source, Stored, StoredParameter
from dllm_jax.checkpoint.tensors import tensors_of_file
from dllm_jax.nn.int8 import HostArray, Weights, axes_of, held_as
from dllm_jax.nn.sharding import WIDE, within_layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import shown

FORMATS: dict[int, Weights | None] = {3: None, 4: "int8"}  # and how they hold matrices
KEYS = ("format", "dtype", "weights", "spec")
UNIT = "unit"  # the key of a unit's name
FILE = 64 * 2**20  # bytes; larger ones are buffered whole in memory
LEAST = 64 * 2**10  # bytes of a piece: smaller ones cost more to find than to read
# Into how many pieces axes are cut at most, those of tensor parallelism first.
PIECES = {"h": 32, "k": 32, "f": 32, "v": 32, "m": 8, "H": 16, "F": 16, "M": 8}


def read_spec(folder: Path, family: Family | None = None) -> tuple[ModelSpec, np.dtype, Weights | None]:
    """Reads and checks the spec.json of a converted directory.

    The ranges of the fields are those of `ModelSpec`, which config.json is read into as well.

    Returns:
      the model, the dtype of all parameters but int8 matrices, and how matrices are held: "int8", or None for
      that dtype.

    Raises:
      FileNotFoundError: there is none.
      ValueError: another format, other keys than that format has, or a value outside of its range, by name.
    """
    config = read_config(folder / SPEC)
    dtypes = {str(dtype): dtype for dtype in SUPPORTED}
    config.check((Requirement("format", (*FORMATS,), True), Requirement("dtype", (*dtypes,), True)))
    written = config.values
    weights = FORMATS[written["format"]]
    # The number says it already, so that a reader that knows no int8 stops at the number.
    config.check((Requirement("weights", (weights,), needed=weights is not None),))
    if unknown := sorted(written.keys() - {*KEYS}):
        raise ValueError(f"{config.where}: unknown keys {named(unknown)}; known: {', '.join(KEYS)}")
    try:
        if not isinstance(fields := written.get("spec"), dict):
            raise TypeError(f"spec={shown(fields)} must be an object with the fields of ModelSpec")
        spec = ModelSpec.of_fields(fields)
        family_of(spec, family)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config.where}: {error}") from error
    return spec, dtypes[written["dtype"]], weights


def write_spec(folder: Path, spec: ModelSpec, dtype: np.dtype, weights: Weights | None):
    """Writes spec.json."""
    number = next(number for number, form in FORMATS.items() if form == weights)
    # Fields at their defaults are left out, as in directories from before there were such.
    fields = dataclasses.asdict(spec)
    changed = {f.name: fields[f.name] for f in dataclasses.fields(spec) if fields[f.name] != f.default}
    content = {"format": number, "dtype": str(dtype)} | ({} if weights is None else {"weights": weights})
    write_object(folder / SPEC, content | {"spec": changed})


def is_converted(path: Path) -> bool:
    """Whether a directory is a converted one, by its content."""
    return (path / SPEC).is_file() and (path / PARAMS).is_dir()


def open_converted(path: Path, family: Family | None = None) -> Source:
    """Opens a converted directory and checks that it is complete and fits its spec.json; reads no weights.

    Raises:
      ValueError: spec.json is of another format or damaged, or the units are not exactly those that it
        describes, by name.
    """
    spec, dtype, weights = read_spec(path, family)
    params = path / PARAMS
    folders = {entry.name for entry in params.iterdir() if not entry.name.startswith(".")}
    if (layers := layers_in_all(spec)) > len(folders):  # before a list of that many is made
        raise ValueError(f"{path / SPEC} describes {layers} layers, but {params} lacks units for that many")
    # The spec is a claim of a file: nothing is allocated before names, shapes and dtypes agree with it.
    units = units_of(spec, family)
    if missing := [unit.name for unit in units if not (params / unit.name).is_dir()]:
        raise ValueError(f"{params} lacks {named(missing)}")
    if extra := sorted(folders - {unit.name for unit in units}):
        raise ValueError(f"{params} holds {named(extra)}, which {SPEC} does not describe")
    check_tree(path, PARAMS)
    for unit in units:
        _check_unit(params / unit.name, _arrays(unit.arrays(spec, dtype, weights)))

    def parameters(unit: Unit) -> dict[str, StoredParameter]:
        stored = lambda path, _: _stored(params / unit.name, _name(path))
        return jax.tree_util.tree_map_with_path(stored, unit.arrays(spec, dtype, weights))

    along = tensors_of_file(path / CARRIED) if (path / CARRIED).is_file() else {}
    return Source(path, spec, frozenset({dtype}), weights, parameters, family=family, carried=along)


def _check_unit(where: Path, expected: dict[str, Any]):
    """Compares what a unit's files say that they are with what spec.json describes; reads no weights.

    So units that changed places are noticed, and nothing is allocated for a spec that the files do not fit.
    """
    # All layers have arrays of the same names and shapes: only the name kept with them tells them apart.
    if (unit := unit_of(where)) != where.name:
        raise ValueError(f"{where} holds the unit {unit}: its directory was renamed, exchanged or emptied")
    # What keeps the dtype that it was stored in may have any that files hold.
    wide = lambda name, dtype: name in WIDE and dtype in SAFETENSORS.values()
    kind = lambda name, dtype: "its own dtype" if wide(name, dtype) else str(dtype)
    known = {name: open_array(where, name) for name in names_of(where)}
    shapes = {name: (tuple(array.shape), kind(name, array.dtype)) for name, array in known.items()}
    wanted = {name: (tuple(array.shape), kind(name, array.dtype)) for name, array in expected.items()}
    if shapes != wanted:
        differing = sorted(
            name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)
        )
        have, want = ({name: side.get(name) for name in differing} for side in (shapes, wanted))
        raise ValueError(f"{where} holds {have}, but {SPEC} describes {want}")


def write_unit(path: Path, unit: Unit, parameters: dict[str, HostArray]):
    """Writes the parameters of one unit, in our layout, into a directory of their own.

    Raises:
      OSError: they cannot be written, e.g. as the disk is full; names the directory.
    """
    where = path / PARAMS / unit.name
    # The letters decide where an array is cut (`piece`); a scale has those of the outputs alone.
    letters = _arrays({leaf: axes_of(leaf, held_as(parameter)) for leaf, parameter in parameters.items()})
    with _errors_named(where, "written", OSError):  # a full disk too, which is ValueError in TensorStore
        for name, values in _arrays(parameters).items():
            pieces = piece(within_layer(letters[name]), values.shape, values.dtype.itemsize)
            array = ts.open(
                _described(where, name) | {"metadata": {"compressor": {"id": "zstd", "level": 1}}},
                create=True,
                dtype=ts.dtype(values.dtype),
                shape=values.shape,
                chunk_layout=ts.ChunkLayout(chunk_shape=pieces),
            ).result()

            # The write is waited for, and nothing changes `values` meanwhile: TensorStore need not copy them.
            array.write(values, can_reference_source_data_indefinitely=True).result()
        # All layers have arrays of the same names: the unit's own is kept with them.
        ts.KvStore.open(_store(where)).result()[UNIT] = unit.name.encode()


def _arrays(parameters: dict[str, Any]) -> dict[str, Any]:
    """The arrays of parameters, or what describes them, by their names: an int8 matrix is two."""
    return {_name(path): array for path, array in jax.tree_util.tree_leaves_with_path(parameters)}


def _name(path: tuple[Any, ...]) -> str:
    """The name of an array: the parameter's, and of an int8 matrix `values` or `scale` after it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _stored(where: Path, name: str) -> Stored:
    """An array of a unit; the scales of int8 matrices are looked at when they are read."""
    stored = open_array(where, name)
    if not name.endswith(".scale"):
        return stored

    def read(ranges: Ranges) -> np.ndarray:
        part = stored.read(ranges)
        if not (np.isfinite(part) & (part > 0)).all():
            raise ValueError(f"{where}: {name} holds numbers that are not positive and finite")
        return part

    return dataclasses.replace(stored, read=read)


def piece(axes: str, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of the pieces that an array is cut into, so that meshes split it between pieces.

    Args:
      axes: a letter per axis, as in `dllm_jax.nn.sharding.AXES`.
      shape: Shape of the array.
      itemsize: bytes of a number.
    """
    # Axes that tensor parallelism splits are cut first, as fine as pieces may be; then the width, for fsdp.
    most = max(1, int(np.prod(shape)) * itemsize // LEAST)
    lengths = list(shape)
    for letter, limit in PIECES.items():
        if letter not in axes:
            continue
        axis = axes.index(letter)
        count = max(n for n in range(1, min(limit, most) + 1) if shape[axis] % n == 0)
        lengths[axis], most = shape[axis] // count, most // count
    return tuple(lengths)


def names_of(path: Path) -> set[str]:
    """Names of the arrays in a directory; none in one that holds nothing of the kind.

    Raises:
      ValueError: the directory is damaged.
    """
    with _errors_named(path):
        keys = ts.KvStore.open(_store(path)).result().list().result()

    # Keys are NAME/.zarray and NAME/PIECE: what stands before the slash is an array's name.
    return {key.decode(errors="replace").partition("/")[0] for key in keys} - {UNIT}


def unit_of(path: Path) -> str | None:
    """The name of the unit that a directory was written as; None if none is kept.

    Raises:
      ValueError: the directory is damaged.
    """
    with _errors_named(path):
        entry = ts.KvStore.open(_store(path)).result().read(UNIT).result()
    return entry.value.decode(errors="replace") if entry.state == "value" else None


def open_array(path: Path, name: str) -> Stored:
    """An array of a directory, of which shape and dtype are read now and its numbers when they are needed.

    Raises:
      ValueError: it is missing or damaged; also raised when it is read.
    """
    with _errors_named(path / name):
        array = ts.open(_described(path, name), open=True, read=True).result()
        dtype = np.dtype(array.dtype.numpy_dtype)

    def read(ranges: Ranges) -> np.ndarray:
        with _errors_named(path / name):
            return array[ranges].read().result()

    return Stored(tuple(array.shape), dtype, read)


@contextlib.contextmanager
def _errors_named(where: Path, done: str = "read", kind: type[Exception] = ValueError) -> Iterator[None]:
    """Errors of TensorStore as one that names the directory first."""
    try:
        yield
    except Exception as error:  # of many kinds: what is in these files goes through several parsers
        raise kind(f"{where} cannot be {done}: {error}") from error


def _described(path: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": _store(path) | {"path": f"{name}/"}}


def _store(path: Path) -> dict[str, Any]:
    return {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{path.absolute()}/"},
        "config": {"compression": {"id": "zstd", "level": 0}},
        "target_data_file_size": FILE,
    }
