"""Placement of parameters on a mesh: a table from parameter to axes, a rule from axes to mesh axes."""

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from dllm_jax.nn.memory import STACKED_HEADS_FIRST
from dllm_jax.nn.spec import ModelSpec

# Axes of every parameter in `dllm_jax.nn.parameters`, one letter each; a leading `n` marks stacked layers.
AXES: dict[str, str] = {
    "embed": "vm",
    "attn_norm": "nm",
    "q": "nmhd",
    "k": "nmkd",
    "v": "nmkd",
    "q_bias": "nhd",
    "k_bias": "nkd",
    "v_bias": "nkd",
    "o": "nhdm",
    "mlp_norm": "nm",
    "gate": "nmf",
    "up": "nmf",
    "down": "nfm",
    "norm": "m",
    "head": "vm",
}
TENSOR_PARALLEL = "tp"
SPLIT = "hkfv"  # heads, kv heads, MLP width and vocabulary are what tensor parallelism divides


def leaves(spec: ModelSpec) -> tuple[str, ...]:
    """Names of the parameters a model of this spec has, in the order of `AXES`."""
    absent = {"head"} if spec.tied else set()
    if not spec.qkv_bias:
        absent |= {"q_bias", "k_bias", "v_bias"}
    return tuple(leaf for leaf in AXES if leaf not in absent)


def sizes(spec: ModelSpec) -> dict[str, int]:
    """Length of every axis letter."""
    return {
        "n": spec.layers,
        "m": spec.width,
        "h": spec.heads,
        "k": spec.kv_heads,
        "d": spec.head,
        "f": spec.hidden,
        "v": spec.vocab,
    }


def shape(spec: ModelSpec, axes: str) -> tuple[int, ...]:
    """Shape of an array with these axes."""
    length = sizes(spec)
    return tuple(length[letter] for letter in axes)


def partition(spec: ModelSpec, axes: str, mesh: Mesh) -> PartitionSpec:
    """Splits the `SPLIT` axes over the mesh axis "tp"; an axis it does not divide is replicated."""
    # Dream's 28 heads and 4 kv heads do not divide by 8: there attention is replicated, the rest is split.
    ways = mesh.shape.get(TENSOR_PARALLEL, 1)
    length = sizes(spec)
    split = [letter in SPLIT and ways > 1 and length[letter] % ways == 0 for letter in axes]
    return PartitionSpec(*(TENSOR_PARALLEL if s else None for s in split))


def sharding(spec: ModelSpec, axes: str, mesh: Mesh) -> NamedSharding:
    """Sharding of an array with these axes; on mesh axes other than "tp" it is replicated."""
    return NamedSharding(automatic(mesh), partition(spec, axes, mesh))


def stacked_format(leaf: str, where: Sharding | None, platform: str) -> Sharding | Format | None:
    """Where a stacked parameter lies and, on TPUs, in which order its axes do; None is the default."""
    if platform != "tpu" or leaf not in STACKED_HEADS_FIRST:
        return where
    return Format(STACKED_HEADS_FIRST[leaf], where or jax.sharding.SingleDeviceSharding(default_device()))


def default_device() -> jax.Device:
    """The device that arrays are put on if nothing else is said."""
    return next(iter(jax.device_put(np.zeros((), np.float32)).devices()))


def automatic(mesh: Mesh) -> Mesh:
    """The same devices with Auto axes: the compiler partitions the model, its code names no mesh axis."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def place(array: np.ndarray, where: NamedSharding | None) -> jax.Array:
    """A host array on the default device, or each device's part of it on that device."""
    if where is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])
