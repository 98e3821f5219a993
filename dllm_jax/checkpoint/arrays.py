"""Arrays in a directory: zarr by way of TensorStore, in pieces that the processes of a mesh read apart.

The pieces of all arrays share a few files (OCDBT, TensorStore's key-value store), as in Orbax checkpoints.
Orbax itself cuts arrays by size alone, along their longest axis: a process that needs some of the heads would
have to read every piece.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from dllm_jax.checkpoint.sharded import Ranges, Stored

UNIT = "unit"  # the key of a unit's name
FILE = 64 * 2**20  # bytes; larger ones are buffered whole in memory
LEAST = 64 * 2**10  # bytes of a piece: smaller ones cost more to find than to read
# Into how many pieces axes are cut at most, those of tensor parallelism first.
PIECES = {"h": 32, "k": 32, "f": 32, "v": 32, "m": 8, "H": 16, "F": 16, "M": 8}


def write(path: Path, unit: str, arrays: Mapping[str, tuple[str, np.ndarray]]):
    """Writes the arrays of a unit into a directory of their own.

    Args:
      path: the directory, which does not exist.
      unit: its name, which is kept beside them.
      arrays: by name, the letters of their axes and the values.

    Raises:
      OSError: they cannot be written, e.g. as the disk is full; names the directory.
    """
    with _named(path, "written", OSError):  # a full disk too, which is ValueError in TensorStore
        for name, (axes, values) in arrays.items():
            cut = ts.ChunkLayout(chunk_shape=piece(axes, values.shape, values.dtype.itemsize))
            array = ts.open(
                _described(path, name) | {"metadata": {"compressor": {"id": "zstd", "level": 1}}},
                create=True,
                dtype=ts.dtype(values.dtype),
                shape=values.shape,
                chunk_layout=cut,
            ).result()

            # The write is waited for, and nothing changes `values` meanwhile: TensorStore need not copy them.
            array.write(values, can_reference_source_data_indefinitely=True).result()
        ts.KvStore.open(_store(path)).result()[UNIT] = unit.encode()


def piece(axes: str, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of the pieces that an array is cut into, so that meshes split it between pieces.

    Args:
      axes: a letter per axis, as in `dllm_jax.nn.sharding.AXES`.
      shape: of the array.
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


def names(path: Path) -> set[str]:
    """Names of the arrays in a directory; none in one that holds nothing of the kind.

    Raises:
      ValueError: the directory is damaged.
    """
    with _named(path):
        keys = ts.KvStore.open(_store(path)).result().list().result()

    # Keys are NAME/.zarray and NAME/PIECE: what stands before the slash is an array's name.
    return {key.decode(errors="replace").partition("/")[0] for key in keys} - {UNIT}


def unit_of(path: Path) -> str | None:
    """The name of the unit that a directory was written as; None if none is kept.

    Raises:
      ValueError: the directory is damaged.
    """
    with _named(path):
        found = ts.KvStore.open(_store(path)).result().read(UNIT).result()
    return found.value.decode(errors="replace") if found.state == "value" else None


def open_array(path: Path, name: str) -> Stored:
    """An array of a directory, of which shape and dtype are read now and its numbers when they are needed.

    Raises:
      ValueError: it is missing or damaged; also raised when it is read.
    """
    with _named(path / name):
        array = ts.open(_described(path, name), open=True, read=True).result()
        dtype = np.dtype(array.dtype.numpy_dtype)

    def read(ranges: Ranges) -> np.ndarray:
        with _named(path / name):
            return array[ranges].read().result()

    return Stored(tuple(array.shape), dtype, read)


@contextlib.contextmanager
def _named(where: Path, done: str = "read", kind: type[Exception] = ValueError) -> Iterator[None]:
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
