"""Placement of parameters on a mesh: a table from parameter to axes, a rule from axes to mesh axes."""

import math

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding

from dllm_jax.nn.mesh import MeshRules, ReplicationWarning, ways
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options.hints import warn
from dllm_jax.xla.order import STACKED_HEADS_FIRST, of_separate_matrix

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
    "q_norm": "nd",
    "k_norm": "nd",
    "o": "nhdm",
    "mlp_norm": "nm",
    "gate": "nmf",
    "up": "nmf",
    "down": "nfm",
    # Of layers with experts, instead of the three above.
    "router": "nme",
    "router_bias": "ne",
    "expert_gate": "nemi",
    "expert_up": "nemi",
    "expert_down": "neim",
    "shared_gate": "nmj",
    "shared_up": "nmj",
    "shared_down": "njm",
    "norm": "m",
    "head": "vm",
}
# Of Gemma 4's layers (u is 1), and of the denoiser's second input, the tokens that the last step expected.
_GEMMA = {
    "attn_post_norm": "nm", "dense_post_norm": "nm", "expert_norm": "nm", "expert_post_norm": "nm",
    "mlp_post_norm": "nm", "router_scale": "nm", "router_expert_scale": "ne", "scalar": "nu",
    "causal_scalar": "nu", "soft_norm": "m", "soft_gate": "mf", "soft_up": "mf", "soft_down": "fm",
}  # fmt: skip
AXES |= _GEMMA
# Of a vision tower and its projector, with the axes of their biases ("" where there are none), in letters of
# their own (`sizes`): N layers, M width, H heads, D head width, F MLP width, P patches, C colors, I and J
# pixels of a patch; E is the inner width of the projector.
_VISION = {
    "patch": ("IJCM", "M"),
    "position": ("PM", ""),
    "norm1": ("NM", "NM"),
    "vision_q": ("NMHD", "NHD"),
    "vision_k": ("NMHD", "NHD"),
    "vision_v": ("NMHD", "NHD"),
    "vision_o": ("NHDM", "NM"),
    "norm2": ("NM", "NM"),
    "fc1": ("NMF", "NF"),
    "fc2": ("NFM", "NM"),
    "post_norm": ("M", "M"),
    "projector_in": ("ME", "E"),
    "projector_out": ("Em", "m"),
    "newline": ("m", ""),
}
_WITH_BIASES = {
    f"{leaf}{name}": axes[i] for leaf, axes in _VISION.items() for i, name in enumerate(("", "_bias"))
}
AXES |= {leaf: axes for leaf, axes in _WITH_BIASES.items() if axes}
VISION = tuple(leaf for leaf in AXES if leaf in _WITH_BIASES)
# Of the matrices: the axes they produce. What is left is summed over. Updates are drawn by their number here.
OUTPUTS: dict[str, str] = {
    "q": "hd",
    "k": "kd",
    "v": "kd",
    "o": "m",
    "gate": "f",
    "up": "f",
    "down": "m",
    "head": "v",
    "expert_gate": "ei",
    "expert_up": "ei",
    "expert_down": "em",
    "shared_gate": "j",
    "shared_up": "j",
    "shared_down": "m",
    "soft_gate": "f",
    "soft_up": "f",
    "soft_down": "m",
}
# Checkpoints may store these in another dtype than the rest, and keep it; models hold them in float32.
WIDE = ("router_bias",)
DENSE = ("gate", "up", "down")  # of layers without experts
EXPERTS = tuple(AXES)[tuple(AXES).index("router") : tuple(AXES).index("norm")]  # of layers with


def leaves(spec: ModelSpec) -> tuple[str, ...]:
    """Names of the parameters a model of this spec has, in the order of `AXES`."""
    absent = set() if spec.vision else set(VISION)
    absent |= set() if spec.gemma else {*_GEMMA}
    if spec.tied:
        absent |= {"head"}
    if not spec.qkv_bias:
        absent |= {"q_bias", "k_bias", "v_bias"}
    if not spec.qk_norm:
        absent |= {"q_norm", "k_norm"}
    if spec.experts is None:
        absent |= {*EXPERTS}
    else:
        absent |= set() if spec.experts.dense or spec.gemma else {*DENSE}
        absent |= set() if spec.experts.bias else {"router_bias"}
        absent |= set() if spec.experts.shared else {"shared_gate", "shared_up", "shared_down"}
    return tuple(leaf for leaf in AXES if leaf not in absent)


def in_layer(spec: ModelSpec, leaf: str, layer: int) -> bool:
    """Whether a layer has a parameter that some layers of the model have."""
    if spec.gemma is not None:  # whose full layers make values of keys
        return leaf != "v" or layer not in spec.gemma.full
    return leaf not in (DENSE if spec.has_experts(layer) else EXPERTS)


def sizes(spec: ModelSpec) -> dict[str, int]:
    """Length of every axis letter."""
    decoder = {
        "n": spec.layers,
        "m": spec.width,
        "h": spec.heads,
        "k": spec.kv_heads,
        "d": spec.head_dim,
        "f": spec.mlp_width,
        "v": spec.vocab,
        "u": 1,
    }
    if (experts := spec.experts) is not None:
        decoder |= {"e": experts.count, "i": experts.mlp_width, "j": experts.shared}
    if (vision := spec.vision) is None:
        return decoder
    return decoder | {
        "N": vision.layers,
        "M": vision.width,
        "H": vision.heads,
        "D": vision.head_dim,
        "F": vision.mlp_width,
        "P": vision.patches,
        "C": 3,
        "I": vision.patch,
        "J": vision.patch,
        "E": spec.width,
    }


def within_layer(axes: str) -> str:
    """The axes of one layer's part of a parameter: without the letter of stacked layers, `n` or `N`."""
    return axes.removeprefix("n").removeprefix("N")


def shape(spec: ModelSpec, axes: str) -> tuple[int, ...]:
    """Shape of an array with these axes."""
    length = sizes(spec)
    return tuple(length[letter] for letter in axes)


def sharding(spec: ModelSpec, axes: str, mesh: Mesh, rules: MeshRules = MeshRules()) -> NamedSharding:
    """Sharding of a parameter with these axes on the mesh, whether its axes are Auto or Explicit.

    An axis that does not divide is replicated, and so is one whose letter has no rule.
    """
    return NamedSharding(mesh, rules.spec(mesh, axes, sizes(spec)))


def replicas(spec: ModelSpec, mesh: Mesh, rules: MeshRules = MeshRules()) -> dict[str, tuple[int, int]]:
    """The parameters that a mesh cannot split as far as the rules want it to.

    Returns:
      by parameter, into how many parts it is split and into how many it should be. Keys and values of fewer
      KV heads than devices are not among them: each head has to be on every device that has queries for it.
    """
    short, length = {}, sizes(spec)
    for leaf in leaves(spec):
        # What the rules want, what divides, and what would divide if kv heads counted as query heads: grouped
        # attention repeats kv heads where there are fewer of them than devices, which is no shortcoming.
        wanted = [rules.axes(mesh, letter) for letter in AXES[leaf]]
        assigned = [rules.axes(mesh, letter, length[letter]) for letter in AXES[leaf]]
        least = [spec.heads if letter == "k" else length[letter] for letter in AXES[leaf]]
        repeated = [rules.axes(mesh, letter, n) for letter, n in zip(AXES[leaf], least, strict=True)]
        if repeated != wanted:
            short[leaf] = tuple(math.prod(ways(mesh, axes) for axes in split) for split in (assigned, wanted))
    return short


def warn_of_replicas(spec: ModelSpec, mesh: Mesh | None, rules: MeshRules):
    """Warns of the parameters that a mesh cannot split as far as the rules want it to, by name."""
    if mesh is not None and (short := replicas(spec, mesh, rules)):
        listed = ", ".join(f"{leaf} ({split} parts of {wanted})" for leaf, (split, wanted) in short.items())
        message = f"not split over all devices of the mesh, as their sizes do not divide: {listed}"
        warn(message, ReplicationWarning)


def format_on(
    platform: str, spec: ModelSpec, leaf: str, where: Sharding | None, stacked: bool
) -> Sharding | Format | None:
    """Where a parameter lies and, on TPUs, in which order its axes do; None is the default.

    Layers that differ, and so do not stack, have an order of their own.
    """
    if platform != "tpu":
        return where
    order = STACKED_HEADS_FIRST.get(leaf) if stacked else None
    if not stacked and spec.layers_differ and leaf in OUTPUTS:
        order = of_separate_matrix(leaf, len(within_layer(AXES[leaf])))
    if order is None:
        return where
    return Format(order, where or jax.sharding.SingleDeviceSharding(default_device()))


def default_device() -> jax.Device:
    """The device that arrays are put on if nothing else is said."""
    return next(iter(jax.device_put(np.zeros((), np.float32)).devices()))
