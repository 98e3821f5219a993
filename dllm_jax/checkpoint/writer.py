"""Writes safetensors one tensor at a time: shapes are known, so the header can go first."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.checkpoint.dtypes import SAFETENSORS
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.hf import INDEX
from dllm_jax.checkpoint.names.table import Unit, tensors_of
from dllm_jax.checkpoint.sharded import Source, StoredParameter
from dllm_jax.nn.sharding import WIDE

SHARD_BYTES = 2 * 10**9


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file to write.

    Attributes:
      tensors: name, shape and dtype in the order they are written.
    """

    tensors: tuple[tuple[str, tuple[int, ...], np.dtype], ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(_size(shape, dtype) for _, shape, dtype in self.tensors)

    @property
    def header(self) -> bytes:
        """The file's beginning: length of the JSON, then the JSON, padded so that data starts aligned."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        codes = {dtype: code for code, dtype in SAFETENSORS.items()}
        start = 0
        for name, shape, dtype in self.tensors:
            end = start + _size(shape, dtype)
            entries[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        # Data begins at a multiple of 8 bytes, which memory maps need.
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan(source: Source, dtype: np.dtype, limit: int) -> tuple[Shard, ...]:
    """Distributes the tensors of a checkpoint, in order, over files of at most `limit` bytes.

    All have the one dtype but those that keep the dtype in which they are stored.

    Raises:
      ValueError: the limit is not positive.
    """
    if limit < 1:
        raise ValueError(f"shard_bytes={limit} must be at least 1")
    shards: list[list[tuple[str, tuple[int, ...], np.dtype]]] = [[]]
    filled = 0
    # In order, the next file when one is full, so that shards are read one after the other.
    for unit in units_of(source.spec):
        kept = {entry.leaf for entry in unit.entries} & {*WIDE}
        own = {leaf: np.dtype(stored.dtype) for leaf, stored in _stored(source, unit, kept)}
        for tensor in tensors_of(source.spec, unit):
            kind = own.get(tensor.parts[0].leaf, dtype)
            if shards[-1] and filled + _size(tensor.shape, kind) > limit:
                shards.append([])
                filled = 0
            shards[-1].append((tensor.name, tensor.shape, kind))
            filled += _size(tensor.shape, kind)
    return tuple(Shard(tuple(tensors)) for tensors in shards)


def _stored(source: Source, unit: Unit, leaves: set[str]) -> list[tuple[str, StoredParameter]]:
    """Some parameters of a unit where they are stored; a unit without any is not opened."""
    found = source.parameters(unit) if leaves else {}
    return [(leaf, found[leaf]) for leaf in leaves]


def write(path: Path, shards: tuple[Shard, ...], tensors: Iterator[np.ndarray]):
    """Writes the files, and the index if there are several; `tensors` come in the shards' order."""
    count, weight_map = len(shards), {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        with (path / name).open("wb") as file:
            file.write(shard.header)
            for _ in shard.tensors:
                # As bytes, since Python's buffers know no bfloat16.
                file.write(np.ascontiguousarray(next(tensors)).view(np.uint8).data)
        weight_map |= {tensor: name for tensor, *_ in shard.tensors}
    if count > 1:
        index = {"metadata": {"total_size": sum(s.nbytes for s in shards)}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize
