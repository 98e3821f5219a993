"""Models to measure: random weights in real or small shapes, made on the device."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import dllm_jax as dj
from dllm_jax.nn.modules import INIT_STD
from dllm_jax.nn.parameters import abstract, form_of_layers
from dllm_jax.nn.sharding import default_device

TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "head": 16, "hidden": 128, "vocab": 512}
SMALL = {"layers": 4, "width": 256, "heads": 4, "kv_heads": 4, "head": 64, "hidden": 768, "vocab": 4096}
BASE = {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "head": 64, "hidden": 2048, "vocab": 8192}
FOR_CPUS = {"tiny": TINY, "small": SMALL, "base": BASE}
PIXELS = (1024, 768)  # width and height of images, unless said otherwise
SHAPES = (*dj.presets.names("models"), *FOR_CPUS)


def shape(name: str, **changes: Any) -> dj.ModelSpec:
    """The spec of a published model, or of LLaDA's architecture in a size for CPUs.

    Raises:
      ValueError: the name is not among SHAPES.
    """
    if name not in SHAPES:
        raise ValueError(f"shape={name!r} must be one of {', '.join(SHAPES)}")
    if name not in FOR_CPUS:
        return dataclasses.replace(dj.presets.model_spec(name), **changes)
    numbers = FOR_CPUS[name]
    ids = {"mask_id": numbers["vocab"] - 1, "eos_id": numbers["vocab"] - 2, "eot_id": None}
    return dataclasses.replace(dj.presets.model_spec("llada-8b"), **{**numbers, **ids, **changes})


def random_model(spec: dj.ModelSpec, dtype: Any, seed: int = 0, gain: float = 1.0) -> dj.Model:
    """Random weights, drawn on the device in `dtype`, one layer (or a few rows of a table) at a time.

    They have the form that `load` gives weights on this device. Memory never holds more than the weights and
    one such piece, or, where layers are separate, one stacked parameter; nothing passes through the host.
    `gain` multiplies the matrices, std 0.02; above 1 attention is more peaked and logits are further apart.
    """
    stacked = not spec.layers_differ
    apart = stacked and form_of_layers(spec, None, default_device().platform)
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract(spec, dtype))
    keys = jax.random.split(jax.random.key(seed), len(paths))
    leaves = []
    for (path, leaf), key in zip(paths, keys, strict=True):
        stack = stacked and path[0].key == "layers"
        array = _leaf(path[-1].key, leaf, key, gain, stack)
        leaves.append(list(array) if apart and stack else array)
    params = jax.tree.unflatten(tree, leaves)
    if apart:
        layers = params["layers"]
        params["layers"] = [{name: layers[name][i] for name in layers} for i in range(spec.layers)]
    return dj.Model(params, spec)


def _leaf(name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array, gain: float, stack: bool) -> jax.Array:
    if "norm" in name:
        return jnp.ones(leaf.shape, leaf.dtype)
    if "bias" in name:
        return jnp.zeros(leaf.shape, leaf.dtype)
    # A layer of a stack at a time; a table [v m] in at most 64 equal parts of its rows.
    pieces = leaf.shape[0] if stack else math.gcd(leaf.shape[0], 64)
    return drawn(key, pieces, leaf.shape, leaf.dtype, gain)


@functools.partial(jax.jit, static_argnames=("pieces", "shape", "dtype", "gain"))
def drawn(key: jax.Array, pieces: int, shape: tuple[int, ...], dtype: Any, gain: float = 1.0) -> jax.Array:
    """Normal numbers of std 0.02 times `gain`, drawn in `pieces` equal parts."""
    part = (math.prod(shape) // pieces,)
    one = lambda key: (gain * INIT_STD * jax.random.normal(key, part, dtype)).astype(dtype)
    return jax.lax.map(one, jax.random.split(key, pieces)).reshape(shape)


def policies_named(names: Sequence[str], spec: dj.ModelSpec | None = None) -> list[dj.policies.Policy]:
    """The policies with these class names, at their defaults, in the order of `policies.ALL`.

    Without names all of them, or all that do not refuse the model of `spec`.

    Raises:
      ValueError: unknown name.
    """
    known = {type(policy).__name__: policy for policy in (*dj.policies.ALL, dj.policies.SubBlockCache())}
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"policies {', '.join(unknown)} are not among {', '.join(known)}")
    if names:
        return [policy for name, policy in known.items() if name in names]
    return [policy for policy in dj.policies.ALL if spec is None or accepts(policy, spec)]


def accepts(policy: dj.policies.Policy, spec: dj.ModelSpec) -> bool:
    """Whether a policy does not refuse the model."""
    block = spec.block_size or 8
    try:
        jax.eval_shape(lambda: policy.init(spec, dj.Layout(block, block, block, block), 1, jnp.bfloat16))
    except ValueError:
        return False
    return True
