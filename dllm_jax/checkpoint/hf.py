"""Reading a Hugging Face directory: config.json and safetensors, one tensor in memory at a time."""

import dataclasses
import functools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dllm_jax.checkpoint.config import Config, read_model_config
from dllm_jax.checkpoint.dtypes import SAFETENSORS, same_bits
from dllm_jax.checkpoint.families import config_to_spec, family_of, units_of
from dllm_jax.checkpoint.files import has_entry
from dllm_jax.checkpoint.messages import what_else
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.fused import by_expert
from dllm_jax.checkpoint.names.spelling import spelled
from dllm_jax.checkpoint.names.table import (
    TensorName,
    Unit,
    check,
    hf_ranges,
    own_axes,
    tensors_of,
    to_ours,
)
from dllm_jax.checkpoint.quantised import dequantised, described
from dllm_jax.checkpoint.sharded import Ranges, Source, Stored, StoredParameter
from dllm_jax.checkpoint.tensors import ADAPTER, Tensor, check_dtypes, tensors_in
from dllm_jax.nn.sharding import WIDE, shape, sizes
from dllm_jax.nn.spec import ModelSpec

LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """The tensors of a directory, which are known to fit its config."""

    path: Path
    spec: ModelSpec
    stored: dict[str, Tensor]
    names: tuple[TensorName, ...]

    def parameters(self, unit: Unit) -> dict[str, StoredParameter]:
        return {entry.leaf: self._parameter(entry) for entry in unit.entries}

    def _parameter(self, entry: TensorName) -> Stored:
        read = functools.partial(self._experts if entry.by_expert else self._part, entry)

        # A file may spell a tied head out: one that is not the embedding would be lost without a word.
        tied = [name for name in self.names if name.leaf == "head" and name.name in self.stored]
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
        """A part of a parameter that has a tensor per expert: one of them in memory besides the part."""
        of, *rest = ranges
        shape = tuple(part.stop - part.start for part in ranges)
        whole = np.empty(shape, self._dtype(entry, sizes(self.spec)["e"]))
        for row, expert in enumerate(range(of.start, of.stop)):
            whole[row] = self._part(entry.of_expert(expert), tuple(rest))
        return whole

    def _part(self, entry: TensorName, ranges: Ranges) -> np.ndarray:
        """A part of our parameter: a view of the part of the tensor that holds it."""
        rows, rest = hf_ranges(self.spec, entry, ranges)
        tensor = self.stored[entry.name].read(rows)
        return to_ours(self.spec, entry, tensor)[rest]

    def _tied_part(self, embed: TensorName, head: TensorName, ranges: Ranges) -> np.ndarray:
        part = self._part(embed, ranges)
        if not same_bits(part, self._part(head, ranges)):
            raise ValueError(
                f"{self.path}: the config ties head and embedding, yet {head.name} differs from the embedding"
            )
        return part


def open_hf(path: Path, family: Family | None = None) -> Source:
    """Opens a Hugging Face directory and checks its tensors' names, shapes and dtypes; reads no weights.

    Names are taken with or without the prefixes of `dllm_jax.checkpoint.names.spelling`.

    Raises:
      FileNotFoundError: no config.json, no safetensors, or a shard the index names is missing.
      ValueError: unsupported config, unreadable file, or tensors that do not fit, by name.
    """
    config = _config(path)
    spec = config_to_spec(config, family)
    names = family_of(spec, family).names
    found = tensors_in(path)
    ours = spelled(found, (entry.name for entry in names), str(path))
    stored = dequantised({ours[name]: tensor for name, tensor in found.items()}, config)
    stored = by_expert(stored, spec, str(path))
    # Headers alone: names, shapes and dtypes are judged before any weight is read.
    check(spec, names, {name: tensor.shape for name, tensor in stored.items()}, str(path))
    if has_entry(path, ADAPTER):
        warnings.warn(
            f"{path}: {ADAPTER} is a LoRA adapter, which load does not apply; lora.load(model, path) does",
            stacklevel=2,
        )
    for fact in _met(spec, config, any(e.leaf == "head" and e.name in stored for e in names)):
        LOG.info("%s: %s", path, fact)
    needed = [tensor for unit in units_of(spec, family) for tensor in tensors_of(spec, unit)]
    kinds = {tensor.name: stored[tensor.name].dtype for tensor in needed}
    check_dtypes(kinds, SAFETENSORS, str(path))
    # Tensors that no parameter is read from do not count, nor do those that keep a dtype of their own.
    own = {tensor.name for tensor in needed if tensor.parts[0].leaf in WIDE}
    plain = {name: SAFETENSORS[kind] for name, kind in kinds.items() if name not in own}
    plain = {name: kind for name, kind in plain.items() if not stored[name].quantised} or plain
    return Source(
        path, spec, frozenset(plain.values()), None, _Tensors(path, spec, stored, names).parameters,
        _of_matrices(plain, stored), described(config), family,
    )  # fmt: skip


def _met(spec: ModelSpec, config: Config, has_head: bool) -> Iterator[str]:
    """Says which of several accepted forms a directory has."""
    if spec.tied:
        yield "the tied head is stored too" if has_head else "the tied head is not stored"
    spellings = [
        key for key in ("rope_theta", "rope_scaling", "rope_parameters") if config.get(key) is not None
    ]
    yield f"rotary embedding stands in {', '.join(spellings)}"
    yield f"mask {spec.mask_id}, ends {', '.join(map(str, spec.ends))}, block size {spec.block_size}"


def _of_matrices(kinds: dict[str, np.dtype], stored: dict[str, Tensor]) -> np.dtype:
    """The dtype of most numbers in matrices, or of most in vectors where there are no matrices."""
    for axes in (2, 1):
        numbers: Counter[np.dtype] = Counter()
        for name, kind in kinds.items():
            numbers[kind] += math.prod(stored[name].shape) if len(stored[name].shape) >= axes else 0
        if numbers.total():
            break
    return numbers.most_common(1)[0][0]


def _config(path: Path) -> Config:
    """The directory's config.json; raises FileNotFoundError that says what is there instead."""
    try:
        return read_model_config(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{what_else(path)}") from None
