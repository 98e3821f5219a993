"""Experts fused into one tensor per layer, as transformers 5 and training frameworks hold them.

...experts.gate_up_proj  [experts, 2 inner, width]   gates, then ups (transformers)
...experts.gate_proj     [experts, inner, width]     alone, and so is up_proj (VeOmni, dFactory)
...experts.down_proj     [experts, width, inner]
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

import numpy as np

from dllm_jax.checkpoint.names.table import TensorName, Unit
from dllm_jax.checkpoint.sharded import Ranges
from dllm_jax.checkpoint.tensors import Tensor
from dllm_jax.nn.spec import ModelSpec

FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}  # of one tensor, one after the other


def by_expert(stored: Mapping[str, Tensor], spec: ModelSpec, where: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint, those of fused experts split as if each expert had its own.

    Raises:
      ValueError: a fused tensor in another shape, such as the transposed one.
    """
    if spec.experts is None:
        return dict(stored)
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        match = FUSED.fullmatch(name)
        found |= {name: tensor} if match is None else _split(name, tensor, match[1], match[2], spec, where)
    return found


def _split(name: str, tensor: Tensor, stem: str, kind: str, spec: ModelSpec, where: str) -> dict[str, Tensor]:
    assert spec.experts is not None, "looked at before"
    parts, inner = PARTS.get(kind, (kind,)), spec.experts.mlp_width
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


def with_fused_experts(unit: Unit) -> Unit:
    """The unit with the tensors of its experts fused as transformers 5 does, to be written."""
    return dataclasses.replace(unit, entries=tuple(map(_fused, unit.entries)))


def _fused(entry: TensorName) -> TensorName:
    if not entry.by_expert:
        return entry
    stem, _, part = entry.name.removesuffix(".weight").partition(".{e}.")
    name = next((name for name, parts in PARTS.items() if part in parts), part)
    return dataclasses.replace(entry, name=f"{stem}.{name}", axes=f"e {entry.axes}")
