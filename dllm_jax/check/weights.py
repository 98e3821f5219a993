"""Models of any shape with random weights, made on the device."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.nn.int8 import Int8Matrix, Weights, is_int8
from dllm_jax.nn.keys import seeded
from dllm_jax.nn.model import Model
from dllm_jax.nn.modules import INIT_STD
from dllm_jax.nn.parameters import abstract, form_of_layers, separate
from dllm_jax.nn.sharding import default_device
from dllm_jax.nn.spec import ModelSpec

STEP = 1 / 32  # of an int8 matrix's values, in standard deviations: the range is four of them


def default_dtype(platform: str) -> str:
    """bfloat16 on accelerators; float32 on a CPU, where bfloat16 is emulated."""
    return "float32" if platform == "cpu" else "bfloat16"


def random_model(spec: ModelSpec, dtype: Any, gain: float = 1.0, weights: Weights | None = None) -> Model:
    """Random weights, drawn on the device in `dtype`, one layer (or a few rows of a table) at a time.

    They have the form that `load` gives weights on this device. Memory never holds more than the weights and
    one such piece; nothing passes through the host.
    `gain` multiplies the matrices, std 0.02; above 1 attention is more peaked and logits are further apart.
    `weights` is "int8" for matrices in int8.
    """
    described = abstract(spec, jnp.dtype(dtype), weights)
    if apart := form_of_layers(spec, None, default_device().platform):
        described = jax.eval_shape(separate, described)
    paths, tree = jax.tree_util.tree_flatten_with_path(described, is_leaf=is_int8)
    leaves = []
    for (path, leaf), key in zip(paths, jax.random.split(seeded(0), len(paths)), strict=True):
        # A layer at a time; of a table [v m] equal parts of its rows.
        layers = 1 if apart else spec.layers
        pieces = layers if path[0].key == "layers" else math.gcd(leaf.shape[0], 64)
        leaves.append(_leaf(path[-1].key, leaf, key, gain, pieces))
    return Model(jax.tree.unflatten(tree, leaves), spec)


def _leaf(name: str, leaf: Any, key: jax.Array, gain: float, pieces: int) -> Any:
    if is_int8(leaf):
        scale = jnp.full(leaf.scale.shape, gain * INIT_STD * STEP, leaf.scale.dtype)
        return Int8Matrix(_leaf(name, leaf.values, key, gain, pieces), scale)
    if "norm" in name or "scal" in name:
        return jnp.ones(leaf.shape, leaf.dtype)
    if "bias" in name:
        return jnp.zeros(leaf.shape, leaf.dtype)
    return drawn(key, pieces, leaf.shape, leaf.dtype, gain)


@functools.partial(jax.jit, static_argnames=("pieces", "shape", "dtype", "gain"))
def drawn(key: jax.Array, pieces: int, shape: tuple[int, ...], dtype: Any, gain: float = 1.0) -> jax.Array:
    """Normal numbers of std 0.02 times `gain`, drawn in `pieces` equal parts; in int8, in `STEP` of these."""
    part = (math.prod(shape) // pieces,)
    if dtype == jnp.int8:
        draw = lambda key: jnp.clip(jax.random.normal(key, part) / STEP, -127, 127).astype(dtype)
    else:
        draw = lambda key: (gain * INIT_STD * jax.random.normal(key, part, dtype)).astype(dtype)
    return jax.lax.map(draw, jax.random.split(key, pieces)).reshape(shape)
