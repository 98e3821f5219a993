"""Weights that other tools quantized, dequantized in float32 while they are read.

    fp8, compressed-tensors   w[o, i] = q[o, i] scale[block of o, i]   (int8: q less its zero)
    gptq                      w[o, i] = scale[g, o] (q[i, o] - (zero[g, o] + 1)),   g of i by `g_idx`
    awq                       w[o, i] = scale[g, o] (q[i, o] - zero[g, o])

The config's `quantization_config` names the method. What each tensor holds its name, dtype and shape say, so
modules that were left as they are (`ignore`, `modules_to_not_convert`) are read as they are.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.dtypes import SAFETENSORS
from dllm_jax.checkpoint.families import QUANTIZED
from dllm_jax.checkpoint.sharded import Ranges
from dllm_jax.checkpoint.tensors import FLOAT8, Tensor
from dllm_jax.options import shown

BITS = (4, 8)
# Of activations and of the cache, which are not quantized here.
UNUSED = r".*\.((input|output)_(scale|scale_ub|zero_point|global_scale)|[qkv]_scale)"
COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense")
# The output that each field of an int32 holds, the lowest first (AutoAWQ; of 8 bits vLLM's `awq_pack`).
AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
DEQUANTIZE = (
    "Take the original, or dequantize it with the tool that quantized it (bitsandbytes: transformers' "
    "`model.dequantize()` and `save_pretrained`)"
)

Tensors = Mapping[str, Tensor]


def dequantized(stored: Tensors, config: Config) -> dict[str, Tensor]:
    """The tensors of a checkpoint, quantized matrices as one tensor `X.weight` each.

    Raises:
      ValueError: a method or a format that is not read, or parts of a matrix that do not fit.
    """
    key, settings = quantization_of(config)
    if settings is None:
        if odd := next((name for name in stored if name.endswith((".qweight", ".weight_packed"))), None):
            raise ValueError(f"{config.where}: {odd} is quantized, but no {key} says how. Add it")
        return dict(stored)
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    read = METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ValueError(
            f"{config.where}: {key} with quant_method={shown(method)[:100]} is not supported; supported: "
            f"{', '.join(METHODS)}. {DEQUANTIZE}"
        )
    used = {name: tensor for name, tensor in stored.items() if not re.fullmatch(UNUSED, name)}
    try:
        return read(used, settings)
    except ValueError as error:
        raise ValueError(f"{config.where}: {key}: {error}") from error


def described(config: Config) -> str | None:
    """How weights are quantized, in words; None if they are not."""
    if (settings := quantization_of(config)[1]) is None:
        return None
    bits = settings.get("bits", settings.get("w_bit"))
    kind = settings.get("format") or settings.get("checkpoint_format")
    return ", ".join([settings["quant_method"], *[f"{bits} bits"] * bool(bits), *[str(kind)] * bool(kind)])


def quantization_of(config: Config) -> tuple[str, Any]:
    """The key and the value of the quantization settings of a config.json; None for a value it has not."""
    settings = ((key, value) for key in QUANTIZED if (value := config.get(key)) is not None)
    return next(settings, (QUANTIZED[0], None))


def _computed(shape: tuple[int, ...], read: Callable[[Ranges], np.ndarray]) -> Tensor:
    return Tensor(shape, "F32", read, quantized=True)


# Weights of a byte with a scale for each block, channel or tensor.


def _scaled(stored: Tensors, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    ):
        raise ValueError(f"weight_block_size={shown(block)[:100]} must be two whole numbers of at least 1")
    tensors = dict(stored)
    for name, tensor in stored.items():
        if tensor.dtype not in (*FLOAT8, "I8") or name.endswith("_zero_point"):
            continue
        scale = next((n for end in ("_scale_inv", "_scale") if (n := name + end) in tensors), None)
        if scale is None:
            raise ValueError(f"{name} is {tensor.dtype} and has no scale ({name}_scale_inv or {name}_scale)")
        zero = tensors.pop(f"{name}_zero_point", None)
        tensors[name] = _of_blocks(name, tensor, tensors.pop(scale), zero, block)
    return tensors


def _of_blocks(name: str, q: Tensor, scale: Tensor, zero: Tensor | None, block: list[int] | None) -> Tensor:
    """A tensor whose last two axes have a scale for each block of them."""
    if scale.dtype not in SAFETENSORS or (
        zero is not None and (zero.dtype, zero.shape) != ("I8", scale.shape)
    ):
        given = "" if zero is None else f" and a zero point {zero.dtype} {list(zero.shape)}"
        rule = "scales must be floats, and a zero point I8 of their shape"
        raise ValueError(f"{name} has a scale {scale.dtype} {list(scale.shape)}{given}: {rule}")
    counts = scale.shape if np.prod(scale.shape, dtype=int) != 1 else (1,) * len(q.shape)
    counts = counts if len(counts) == len(q.shape) else (*counts, 1)
    sides = (1,) * (len(q.shape) - 2) + tuple(block or (0, 0))  # 0: one number or all of them
    steps = tuple(map(_step, q.shape, counts, sides)) if len(counts) == len(q.shape) == len(sides) else (0,)
    if 0 in steps:
        blocks = "" if block is None else f" and weight_block_size={block}"
        raise ValueError(f"{name} is {list(q.shape)}: a scale of {list(scale.shape)}{blocks} does not fit")

    def read(ranges: Ranges) -> np.ndarray:
        of = np.ix_(*(np.arange(r.start, r.stop) // step for r, step in zip(ranges, steps, strict=True)))
        wide = lambda tensor: np.asarray(tensor.whole()).astype(np.float32).reshape(counts)[of]
        values = q.read(ranges).astype(np.float32)
        return (values if zero is None else values - wide(zero)) * wide(scale)

    return _computed(q.shape, read)


def _step(length: int, count: int, side: int) -> int:
    """How many numbers of an axis share one of `count` scales; 0 if that cannot be."""
    if side and -(-length // side) == count:
        return side
    return 1 if count == length else length if count == 1 else 0


def _compressed(stored: Tensors, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """compressed-tensors: bytes with scales, or integers packed in the order of the inputs."""
    groups = settings.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    sparse = settings.get("sparsity_config")
    formats = [
        each.get("format") for each in (settings, *groups, *([sparse] if isinstance(sparse, dict) else []))
    ]
    if odd := sorted(str(name) for name in formats if name is not None and name not in COMPRESSED):
        raise ValueError(
            f"format={odd[0][:100]!r} is not supported; supported: {', '.join(COMPRESSED)}. {DEQUANTIZE}"
        )
    of = [group["weights"] for group in groups if isinstance(group.get("weights"), dict)]
    blocks = [w.get("block_structure") or ([1, w["group_size"]] if w.get("group_size") else None) for w in of]
    block = next((b for b in blocks if b is not None), None)
    tensors = dict(stored)
    for name in [name for name in stored if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        if f"{stem}_zero_point" in tensors:
            raise ValueError(f"{stem} has a zero point: asymmetric pack-quantized is not read. {DEQUANTIZE}")
        parts = [tensors.pop(f"{stem}_{part}", None) for part in ("packed", "scale", "shape", "g_idx")]
        tensors[stem] = _packed(stem, *parts)
    plain = {"weight_block_size": block if isinstance(block, list) else None}
    return _scaled(tensors, plain)


def _packed(
    name: str, packed: Tensor | None, scale: Tensor | None, shape: Tensor | None, order: Tensor | None
) -> Tensor:
    if packed is None or scale is None or shape is None or shape.shape != (2,):
        raise ValueError(f"{name} lacks one of {name}_packed, {name}_scale and {name}_shape [2]")
    _check_parts(name, (packed,), scale, order)
    outputs, inputs = map(int, shape.whole())
    bits = next((b for b in BITS if packed.shape == (outputs, -(-inputs * b // 32))), None)
    groups = scale.shape[1]
    if bits is None or scale.shape[0] != outputs or inputs % groups:
        shapes = f"{list(packed.shape)}, scales {list(scale.shape)}"
        raise ValueError(f"{name} of {[outputs, inputs]} is not packed in 4 or 8 bits by groups: {shapes}")

    def read(ranges: Ranges) -> np.ndarray:
        rows, columns = ranges
        fields = _fields(packed.read((rows, slice(0, packed.shape[1]))), bits)
        q = fields.reshape(len(fields), -1)[:, :inputs] - np.float32(2 ** (bits - 1))
        group = _groups(name, order, inputs, groups)
        scales = scale.read((rows, slice(0, groups))).astype(np.float32)
        return (q * scales[:, group])[:, columns]

    return _computed((outputs, inputs), read)


# Integers in int32 with scales and zeros for each group of inputs, stored [inputs, outputs].


def _gptq(stored: Tensors, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    kind = settings.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format={shown(kind)[:100]} is not supported; supported: gptq, gptq_v2")
    return _each(
        stored, settings.get("bits"), True, functools.partial(_of_groups, offset=int(kind == "gptq"))
    )


def _awq(stored: Tensors, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ValueError(f"version={shown(version)[:100]} is not supported; supported: gemm")
    return _each(stored, settings.get("bits", settings.get("w_bit")), False, _of_groups)


def _each(stored: Tensors, bits: Any, by_input: bool, make: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Every `X.qweight` with its parts as `X.weight`; fields are packed along inputs, or along outputs."""
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"bits={shown(bits)[:100]} is not supported; supported: 4, 8. {DEQUANTIZE}")
    tensors = dict(stored)
    for name in [name for name in stored if name.endswith(".qweight")]:
        stem = name.removesuffix(".qweight")
        parts = [tensors.pop(f"{stem}.{part}", None) for part in ("qweight", "qzeros", "scales", "g_idx")]
        tensors[f"{stem}.weight"] = make(stem, bits, by_input, *parts)
    return tensors


def _of_groups(
    name: str,
    bits: int,
    by_input: bool,
    packed: Tensor,
    zeros: Tensor | None,
    scales: Tensor | None,
    order: Tensor | None,
    offset: int = 0,
) -> Tensor:
    fields = 32 // bits
    if zeros is None or scales is None:
        raise ValueError(f"{name} lacks one of {name}.qweight, {name}.qzeros and {name}.scales")
    _check_parts(name, (packed, zeros), scales, order)
    inputs = packed.shape[0] * (fields if by_input else 1)
    groups, outputs = scales.shape
    widths = packed.shape[1] * (1 if by_input else fields), zeros.shape[-1] * fields
    fits = widths == (outputs, outputs) and zeros.shape[0] == groups
    if not fits or (order is not None and order.shape != (inputs,)) or (order is None and inputs % groups):
        raise ValueError(f"{name} is not packed in {bits} bits: its parts have other shapes")
    sequence = list(range(fields)) if by_input else np.argsort(AWQ_ORDER[bits])

    def read(ranges: Ranges) -> np.ndarray:
        rows, columns = ranges  # outputs and inputs
        # Whole fields of outputs are read: their zeros, and AWQ's weights, share an int32.
        first, last = rows.start // fields, -(-rows.stop // fields)
        selected = slice(rows.start - first * fields, rows.stop - first * fields)
        along_outputs = lambda array: _fields(array, bits)[..., sequence].reshape(len(array), -1)[:, selected]
        if by_input:
            q = _fields(packed.read((slice(0, packed.shape[0]), rows)), bits)
            q = q.transpose(0, 2, 1).reshape(inputs, -1)
        else:
            q = along_outputs(packed.read((slice(0, inputs), slice(first, last))))
        zero = along_outputs(zeros.read((slice(0, groups), slice(first, last)))) + np.float32(offset)
        scale = scales.read((slice(0, groups), rows)).astype(np.float32)
        group = _groups(name, order, inputs, groups)
        return (scale[group] * (q - zero[group])).T[:, columns]

    return _computed((outputs, inputs), read)


def _check_parts(name: str, packed: tuple[Tensor, ...], scales: Tensor, order: Tensor | None):
    """Raises ValueError unless numbers are packed in int32 and scaled by groups, all in matrices."""
    whole = order is None or (order.dtype in ("I32", "I64") and len(order.shape) == 1)
    fits = all(part.dtype == "I32" and len(part.shape) == 2 for part in packed)
    if not (whole and fits and scales.dtype in SAFETENSORS and len(scales.shape) == 2 and min(scales.shape)):
        known = "int32 [., .], float scales [., .] and integers g_idx [.]"
        raise ValueError(f"{name}: its parts are empty, or of other dtypes or axes than {known}")


def _groups(name: str, order: Tensor | None, inputs: int, groups: int) -> np.ndarray:
    """The group of every input."""
    if order is None:
        return np.arange(inputs) // (inputs // groups)
    group = np.asarray(order.whole())
    if group.min() < 0 or group.max() >= groups:
        raise ValueError(f"{name}: g_idx has groups {group.min()} to {group.max()}, of {groups}")
    return group


def _fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of `bits` in each int32, the lowest first, along a new last axis; float32."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((packed.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)).astype(np.float32)


METHODS: dict[str, Callable[[Tensors, Mapping[str, Any]], dict[str, Tensor]]] = {
    "fp8": _scaled,
    "fbgemm_fp8": _scaled,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
