"""Reading a Hugging Face directory: config.json and safetensors, one tensor in memory at a time."""

import dataclasses
import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dllm_jax.checkpoint.config import Config, read_model_config
from dllm_jax.checkpoint.dtypes import SAFETENSORS, same_bits
from dllm_jax.checkpoint.families import config_to_spec, family_of, units_of
from dllm_jax.checkpoint.files import INDEX, has_entry, what_else
from dllm_jax.checkpoint.files import named as named_files
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import (
    FUSED_PARTS,
    TensorName,
    Unit,
    check_tensors,
    hf_ranges,
    own_axes,
    spelled,
    tensors_of,
    to_ours,
)
from dllm_jax.checkpoint.quantized import dequantized, described
from dllm_jax.checkpoint.sharded import Ranges, Source, Stored, StoredParameter
from dllm_jax.checkpoint.tensors import ADAPTER, WHOLE, Tensor, carried, check_dtypes, read_index, tensors_in
from dllm_jax.nn.sharding import WIDE, shape
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options.hints import warn

LOG = logging.getLogger(__name__)
FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")


def open_hf(path: Path, family: Family | None = None) -> Source:
    """Opens a Hugging Face directory and checks its tensors' names, shapes and dtypes; reads no weights.

    Names are taken with or without the prefixes of `dllm_jax.checkpoint.names.table`.

    Raises:
      FileNotFoundError: no config.json, no safetensors, or a shard the index names is missing.
      ValueError: unsupported config, unreadable file, or tensors that do not fit, by name.
    """
    config = _config(path)
    spec = config_to_spec(config, family)
    names = family_of(spec, family).names
    tensors = tensors_in(path)
    ours = spelled(tensors, (entry.name for entry in names), str(path))
    named = {ours[name]: tensor for name, tensor in tensors.items()}
    along = carried(named, family_of(spec, family).carried)
    stored = dequantized({name: tensor for name, tensor in named.items() if name not in along}, config)
    stored = by_expert(stored, spec, str(path))
    # Headers alone: names, shapes and dtypes are judged before any weight is read.
    check_tensors(spec, names, {name: tensor.shape for name, tensor in stored.items()}, str(path))
    if has_entry(path, ADAPTER):
        warn(
            f"{path}: {ADAPTER} is a LoRA adapter, which load does not apply; lora.load(model, path) does",
        )
    if has_entry(path, WHOLE) and WHOLE not in (files := {*read_index(path).values()} or {WHOLE}):
        warn(
            f"{path} holds {WHOLE} beside {INDEX}, which names {named_files(sorted(files), 2)}: these are "
            f"read, where transformers reads {WHOLE}. Remove what is not meant",
        )
    head = next((entry.name for entry in names if entry.leaf == "head" and entry.name in stored), None)
    for fact in _met(spec, config, head is not None):
        LOG.info("%s: %s", path, fact)
    if spec.tied and head is not None:
        embed = next(entry.name for entry in names if entry.leaf == "embed")
        stored[embed] = _tied(
            stored[embed], stored[head], f"{path}: the config ties head and embedding, yet {head}"
        )
    needed = [tensor for unit in units_of(spec, family) for tensor in tensors_of(spec, unit)]
    kinds = {tensor.name: stored[tensor.name].dtype for tensor in needed}
    check_dtypes(kinds, SAFETENSORS, str(path))
    # Tensors that no parameter is read from do not count, nor do those that keep a dtype of their own.
    wide = {tensor.name for tensor in needed if tensor.parts[0].leaf in WIDE}
    plain = {name: SAFETENSORS[kind] for name, kind in kinds.items() if name not in wide}
    plain = {name: kind for name, kind in plain.items() if not stored[name].quantized} or plain

    def parameters(unit: Unit) -> dict[str, StoredParameter]:
        return {entry.leaf: _parameter(spec.at(unit.layer), stored, entry) for entry in unit.entries}

    return Source(
        path, spec, frozenset(plain.values()), None, parameters, _of_matrices(plain, stored),
        described(config), family, along,
    )  # fmt: skip


def by_expert(stored: Mapping[str, Tensor], spec: ModelSpec, where: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, those of fused experts split as if each expert had its own.

    Transformers 5 and training frameworks hold the experts of a layer in one tensor:

    ...experts.gate_up_proj  [experts, 2 inner, width]   gates, then ups (transformers)
    ...experts.gate_proj     [experts, inner, width]     alone, and so is up_proj (VeOmni, dFactory)
    ...experts.down_proj     [experts, width, inner]

    Raises:
      ValueError: a fused tensor in another shape, such as the transposed one.
    """
    if spec.experts is None:
        return dict(stored)
    split: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        match = FUSED.fullmatch(name)
        split |= {name: tensor} if match is None else _split(name, tensor, match[1], match[2], spec, where)
    return split


def _split(name: str, tensor: Tensor, stem: str, kind: str, spec: ModelSpec, where: str) -> dict[str, Tensor]:
    assert spec.experts is not None, "looked at before"
    parts, inner = FUSED_PARTS.get(kind, (kind,)), spec.experts.mlp_width
    rows, inputs = (spec.width, inner) if kind == "down_proj" else (inner, spec.width)
    expected = spec.experts.count, rows * len(parts), inputs
    if tensor.shape != expected:
        raise ValueError(
            f"{where}: {name} is {list(tensor.shape)}, expected {list(expected)}: fused experts are read as "
            "[experts, outputs, inputs], gates before ups. Save a tensor per expert"
        )
    return {
        f"{stem}.{expert}.{part}.weight": Tensor(
            (rows, inputs),
            tensor.dtype,
            functools.partial(_read, tensor, expert, number * rows),
            tensor.quantized,
        )
        for expert in range(spec.experts.count)
        for number, part in enumerate(parts)
    }


def _read(fused: Tensor, expert: int, before: int, ranges: Ranges) -> np.ndarray:
    rows, columns = ranges
    part = slice(expert, expert + 1), slice(before + rows.start, before + rows.stop), columns
    return fused.read(part)[0]


def _parameter(spec: ModelSpec, stored: dict[str, Tensor], entry: TensorName) -> Stored:
    """A parameter where it is stored, of which each expert's part may have a tensor of its own."""
    extent = shape(spec, own_axes(entry.leaf))
    entries = [entry.of_expert(expert) for expert in range(extent[0])] if entry.by_expert else [entry]
    # Of several dtypes, the one that holds all.
    dtype = np.dtype(
        functools.reduce(jnp.promote_types, {SAFETENSORS[stored[e.name].dtype] for e in entries})
    )

    def part(entry: TensorName, ranges: Ranges) -> np.ndarray:
        rows, rest = hf_ranges(spec, entry, ranges)
        return to_ours(spec, entry, stored[entry.name].read(rows))[rest]

    def of_experts(ranges: Ranges) -> np.ndarray:
        # One expert in memory besides the part.
        chosen, *rest = ranges
        whole = np.empty([each.stop - each.start for each in ranges], dtype)
        for row, entry_ in enumerate(entries[chosen]):
            whole[row] = part(entry_, tuple(rest))
        return whole

    return Stored(extent, dtype, of_experts if entry.by_expert else functools.partial(part, entry))


def _tied(embed: Tensor, head: Tensor, beginning: str) -> Tensor:
    """The embedding of a file that spells a tied head out: another head would be lost without a word."""

    def read(ranges: Ranges) -> np.ndarray:
        part = embed.read(ranges)
        if not same_bits(part, head.read(ranges)):
            raise ValueError(f"{beginning} differs from the embedding")
        return part

    return dataclasses.replace(embed, read=read)


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
