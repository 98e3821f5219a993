"""Tiny random models of both families, and canvases in the middle of a run."""

import dataclasses
import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.nn import parameters
from dllm_jax.nn.int8 import quantise
from dllm_jax.nn.parameters import abstract
from dllm_jax.nn.sharding import AXES, OUTPUTS
from dllm_jax.state.canvas import Canvas, begin
from dllm_jax.state.layout import Layout

FAMILIES = ("llada", "dream")

_COMMON = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "head": 8,
    "hidden": 48,
    "vocab": 61,
    "mask_id": 59,
    "eos_id": 57,
    "eot_id": 58,
}
_SPECS = {
    "llada": dj.ModelSpec(
        family="llada",
        kv_heads=4,
        rope_base=5e5,
        norm_eps=1e-5,
        qkv_bias=False,
        tied=False,
        shifted=False,
        rope_in_f32=True,
        pad_rows_attend=True,
        **_COMMON,
    ),
    "dream": dj.ModelSpec(
        family="dream",
        kv_heads=2,
        rope_base=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
        tied=False,
        shifted=True,
        rope_in_f32=False,
        pad_rows_attend=False,
        **_COMMON,
    ),
}


def spec(family: str, **changes) -> dj.ModelSpec:
    """The family's tiny spec with some fields changed."""
    return dataclasses.replace(_SPECS[family], **changes)


@functools.cache
def tiny(family: str, **spec_changes) -> dj.Model:
    """A float32 model with random weights: the same for the same arguments, on every platform."""
    described = spec(family, **spec_changes)
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract(described))
    params = [_weight(jax.tree_util.keystr(path), leaf.shape) for path, leaf in leaves]
    return dj.Model(jax.tree.unflatten(tree, params), described)


def frequencies(vocab: int = _COMMON["vocab"]) -> dj.samplers.TokenFrequencies:
    """A corpus in which the n-th token is as common as 1 / n, in a random order of tokens."""
    rank = 1 + np.random.default_rng(5).permutation(vocab)
    return dj.samplers.TokenFrequencies(1 / rank / (1 / rank).sum())


def separate(model: dj.Model) -> dj.Model:
    """The same model with a list of layers."""
    return dataclasses.replace(model, params=parameters.separate(model.params))


def in_int8(model: dj.Model) -> dj.Model:
    """The same stacked model with its matrices in int8."""

    def held(path, array):
        name = path[-1].key
        if name not in OUTPUTS:
            return array
        layers = "n" * (path[0].key == "layers")  # every layer has channels of its own
        return jax.tree.map(jnp.asarray, quantise(np.asarray(array), AXES[name], layers + OUTPUTS[name]))

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(held, model.params))


def cast(model: dj.Model, dtype) -> dj.Model:
    """The same model in another dtype."""
    return dataclasses.replace(model, params=jax.tree.map(lambda a: a.astype(dtype), model.params))


def _weight(path: str, shape: tuple[int, ...]) -> jax.Array:
    """Seeded by its name; scaled so that attention is peaked and logits spread by about 2."""
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    drawn = rng.standard_normal(shape)
    if "norm" in path:
        drawn = 1 + 0.2 * drawn
    elif "bias" in path:
        drawn = 0.5 * drawn
    elif "head" in path:
        drawn = 2 * drawn / math.sqrt(shape[-1])
    elif "layers" in path:
        inputs = math.prod(shape[1:-1]) if "'o'" in path else shape[1]
        drawn = 1.5 * drawn / math.sqrt(inputs)
    return jnp.asarray(drawn, jnp.float32)


def random_tokens(spec: dj.ModelSpec, *shape: int, seed: int = 0) -> np.ndarray:
    """Ordinary ids: neither mask nor end-of-text nor end-of-turn."""
    ordinary = min(i for i in (spec.mask_id, spec.eos_id, spec.eot_id) if i is not None)
    return np.random.default_rng(seed).integers(0, ordinary, shape, dtype=np.int32)


def canvas(
    masked,
    prompt: int = 0,
    block: int | None = None,
    steps: int | None = None,
    family: str = "llada",
    **state,
) -> Canvas:
    """A canvas that is masked exactly where told, other fields as at the start unless given in `state`."""
    described = spec(family)
    masked = np.asarray(masked, bool)
    batch, length = masked.shape
    response = length - prompt
    layout = Layout(prompt, response, block or response, steps or response, padded="valid" in state)
    tokens = np.where(masked, described.mask_id, random_tokens(described, batch, length))
    valid = jnp.asarray(state.pop("valid", np.ones((batch, length), bool)))
    return dataclasses.replace(begin(jnp.asarray(tokens), valid, described, layout), **state)
