"""Reading a Hugging Face directory: config.json and safetensors, one tensor in memory at a time."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dllm_jax.checkpoint.config import read_config
from dllm_jax.checkpoint.dtypes import SAFETENSORS, same_bits
from dllm_jax.checkpoint.families import config_to_spec, family_of, units_of
from dllm_jax.checkpoint.files import INDEX, file_inside, has_entry
from dllm_jax.checkpoint.names.table import (
    TensorName,
    Unit,
    check,
    hf_ranges,
    own_axes,
    tensors_of,
    to_ours,
)
from dllm_jax.checkpoint.sharded import Ranges, Source, Stored, StoredParameter
from dllm_jax.nn.sharding import WIDE, shape, sizes
from dllm_jax.nn.spec import ModelSpec


class TensorLocation(NamedTuple):
    """Where a tensor is stored: its file, its shape there and its dtype by safetensors' name."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """The tensors of a directory, which are known to fit its config."""

    path: Path
    spec: ModelSpec
    stored: dict[str, TensorLocation]

    def parameters(self, unit: Unit) -> dict[str, StoredParameter]:
        return {entry.leaf: self._parameter(entry) for entry in unit.entries}

    def _parameter(self, entry: TensorName) -> Stored:
        read = functools.partial(self._experts if entry.by_expert else self._part, entry)

        # A file may spell a tied head out: one that is not the embedding would be lost without a word.
        tied = [
            name for name in family_of(self.spec).names if name.leaf == "head" and name.name in self.stored
        ]
        if self.spec.tied and entry.leaf == "embed" and tied:
            read = functools.partial(self._tied_part, entry, tied[0])
        own = shape(self.spec, own_axes(entry.leaf))
        return Stored(own, self._dtype(entry, own[0]), read)

    def _dtype(self, entry: TensorName, count: int) -> np.dtype:
        """The dtype of a parameter: of `count` experts, the one that holds all of theirs."""
        names = [entry.of_expert(expert).name for expert in range(count)] if entry.by_expert else [entry.name]
        kinds = {SAFETENSORS[self.stored[name].dtype] for name in names}
        return np.dtype(functools.reduce(jnp.promote_types, kinds))

    def _experts(self, entry: TensorName, ranges: Ranges) -> np.ndarray:
        """A part of a parameter that has a tensor per expert: one of them in memory beside the part."""
        of, *rest = ranges
        shape = tuple(part.stop - part.start for part in ranges)
        whole = np.empty(shape, self._dtype(entry, sizes(self.spec)["e"]))
        for row, expert in enumerate(range(of.start, of.stop)):
            whole[row] = self._part(entry.of_expert(expert), tuple(rest))
        return whole

    def _part(self, entry: TensorName, ranges: Ranges) -> np.ndarray:
        """A part of our parameter: a view of the part of the tensor that holds it."""
        rows, rest = hf_ranges(self.spec, entry, ranges)
        # Opened anew for each part: an open file keeps every page read so far mapped, which would count as
        # the process's memory and grow to the size of the shard.
        with safetensors(self.stored[entry.name].file) as opened:
            tensor = opened.get_slice(entry.name)[rows]
        return to_ours(self.spec, entry, tensor)[rest]

    def _tied_part(self, embed: TensorName, head: TensorName, ranges: Ranges) -> np.ndarray:
        part = self._part(embed, ranges)
        if not same_bits(part, self._part(head, ranges)):
            raise ValueError(
                f"{self.path}: the config ties head and embedding, yet {head.name} differs from the embedding"
            )
        return part


def open_hf(path: Path) -> Source:
    """Opens a Hugging Face directory and checks its tensors' names, shapes and dtypes; reads no weights.

    Raises:
      FileNotFoundError: no config.json, no safetensors, or a shard the index names is missing.
      ValueError: unsupported config, unreadable file, or tensors that do not fit (all of them listed).
    """
    spec = config_to_spec(read_config(path / "config.json"))
    stored: dict[str, TensorLocation] = {}
    for file in weight_files(path):
        for name, tensor in _header(file).items():
            if name in stored:
                raise ValueError(f"{path}: {name} is in both {stored[name].file.name} and {file.name}")
            stored[name] = tensor
    # Headers alone: names, shapes and dtypes are judged before any weight is read.
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    names = family_of(spec).names
    check(spec, names, shapes, str(path))
    needed = [tensor for unit in units_of(spec) for tensor in tensors_of(spec, unit)]
    kinds = {tensor.name: stored[tensor.name].dtype for tensor in needed}
    odd = [f"{name}: {kind}" for name, kind in kinds.items() if kind not in SAFETENSORS]
    if odd:
        raise ValueError(
            "\n  ".join([f"{path}: dtypes that are not supported; supported: {', '.join(SAFETENSORS)}", *odd])
        )
    # Tensors that no parameter is read from do not count, nor do those that keep a dtype of their own.
    own = {tensor.name for tensor in needed if tensor.parts[0].leaf in WIDE}
    dtypes = frozenset(SAFETENSORS[kind] for name, kind in kinds.items() if name not in own)
    return Source(path, spec, dtypes, None, _Tensors(path, spec, stored).parameters)


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a directory: those its index names, or all where there is no index.

    Raises:
      FileNotFoundError: there is none, or one the index names is missing.
      ValueError: the index is not valid, or a file lies outside of the directory.
    """
    if has_entry(path, INDEX):
        index = read_config(path / INDEX).values.get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
            raise ValueError(f"{path / INDEX} has no weight_map from tensor to file")
        # An index may name anything: files of this directory only.
        return tuple(file_inside(path, name) for name in sorted(set(index.values())))
    files = tuple(file_inside(path, file.name) for file in sorted(path.glob("*.safetensors")))
    if not files:
        others = [file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pt", ".pth")]
        hint = f"; {', '.join(others)} would need torch and is not read" if others else ""
        raise FileNotFoundError(f"{path} holds no *.safetensors{hint}")
    return files


def _header(file: Path) -> dict[str, TensorLocation]:
    file.open("rb").close()  # names a file that may not be read, which safetensors calls missing
    with safetensors(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        return {
            name: TensorLocation(file, tuple(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        }


@contextlib.contextmanager
def safetensors(file: Path) -> Iterator[Any]:
    """A safetensors file, open; raises ValueError that names it where it cannot be read."""
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
