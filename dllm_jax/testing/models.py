"""Tiny random models of every kind, which a CPU compiles in seconds."""

import dataclasses
import functools
import math
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dllm_jax.nn import parameters
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ExpertSpec, GemmaSpec, ModelSpec, RopeScaling
from dllm_jax.options import shown

_LLADA = ModelSpec(
    family="llada", layers=2, width=32, heads=4, kv_heads=4, head_dim=8, mlp_width=48, vocab=61, mask_id=59,
    eos_id=57, eot_id=58, rope_base=5e5, norm_eps=1e-5, qkv_bias=False, tied=False, shifted=False,
    rope_in_f32=True, pad_rows_attend=True,
)  # fmt: skip
_DREAM = dataclasses.replace(
    _LLADA, family="dream", kv_heads=2, rope_base=1e6, norm_eps=1e-6, qkv_bias=True, shifted=True,
    rope_in_f32=False, pad_rows_attend=False,
)  # fmt: skip
_LLADA_MOE = dataclasses.replace(
    _LLADA, family="llada-moe", rope_base=5e4, rope_in_f32=False, qk_norm=True,
    experts=ExpertSpec(count=6, per_token=2, mlp_width=24),
)  # fmt: skip
_SDAR = dataclasses.replace(
    _DREAM, family="sdar", qkv_bias=False, shifted=False, pad_rows_attend=True, qk_norm=True, block_size=12
)
_FAST_DLLM_V2 = dataclasses.replace(
    _SDAR, family="fast-dllm-v2", qk_norm=False, qkv_bias=True, shifted=True
)  # fmt: skip
_NEMOTRON = dataclasses.replace(
    _SDAR, family="nemotron", qk_norm=False, head_dim=6, block_size=4, blocks_from="response",
    causal_context=True, rope_scaling=RopeScaling("yarn", 4.0, 5, mscale=1.0, query_beta=0.1),
)  # fmt: skip
_A2D = dataclasses.replace(_SDAR, family="a2d-qwen3", block_size=0, blocks_from="response")
_RND1 = dataclasses.replace(
    _SDAR, family="rnd1", block_size=0, shifted=True,
    experts=ExpertSpec(count=6, per_token=2, mlp_width=24, renormalized=True),
)  # fmt: skip
_GEMMA = dataclasses.replace(
    _SDAR, family="diffusion-gemma", layers=3, tied=True, mask_id=61, block_size=8, blocks_from="response",
    causal_context=True, experts=ExpertSpec(count=6, per_token=2, mlp_width=24, renormalized=True),
    gemma=GemmaSpec((2,), window=6, head_dim=16, kv_heads=1, rope_base=1e6, rope_width=4, softcap=30.0),
)  # fmt: skip
_SPECS = {
    spec.family: spec
    for spec in (_LLADA, _DREAM, _LLADA_MOE, _SDAR, _FAST_DLLM_V2, _NEMOTRON, _A2D, _RND1, _GEMMA)
}
# One family for each kind of model: full attention, shifted output head, block-causal, causal context.
FAMILIES = ("llada", "dream", "sdar", "nemotron")


def spec(family: str, **changes: Any) -> ModelSpec:
    """The family's tiny spec with some fields changed.

    Raises:
      ValueError: there is no such family.
    """
    if family not in _SPECS:
        raise ValueError(f"family={shown(family)} must be one of {', '.join(_SPECS)}")
    return dataclasses.replace(_SPECS[family], **changes)


@functools.cache
def tiny(family: str, **spec_changes: Any) -> Model:
    """A float32 model with random weights: the same for the same arguments, on every platform."""
    described = spec(family, **spec_changes)
    leaves, tree = jax.tree_util.tree_flatten_with_path(parameters.abstract(described))
    # Of a function that is traced it would keep tracers, for callers that are not.
    with jax.ensure_compile_time_eval():
        params = [_weight(jax.tree_util.keystr(path), leaf.shape) for path, leaf in leaves]
    return Model(jax.tree.unflatten(tree, params), described)


def separate_layers(model: Model) -> Model:
    """The same model with a list of layers."""
    return dataclasses.replace(model, params=parameters.separate(model.params))


def cast(model: Model, dtype: Any) -> Model:
    """The same model in another dtype."""
    return dataclasses.replace(model, params=jax.tree.map(lambda a: a.astype(dtype), model.params))


def random_tokens(spec: ModelSpec, *shape: int, seed: int = 0) -> Int[np.ndarray, "..."]:
    """Ordinary ids: neither mask nor end-of-text nor end-of-turn."""
    ordinary = min(i for i in (spec.mask_id, spec.eos_id, spec.eot_id) if i is not None)
    return np.random.default_rng(seed).integers(0, ordinary, shape, dtype=np.int32)


def random_prompts(
    model: Model, lengths: tuple[int, ...] = (9, 9), seed: int = 0
) -> tuple[Int[np.ndarray, "b p"], Bool[np.ndarray, "b p"]]:
    """Random prompts, left-padded with the end-of-text id, and their mask."""
    width = max(lengths)
    ids = np.random.default_rng(seed).integers(0, model.spec.vocab - 20, (len(lengths), width))
    mask = np.arange(width) >= width - np.asarray(lengths)[:, None]
    return np.where(mask, ids, model.spec.eos_id), mask


def _weight(path: str, shape: tuple[int, ...]) -> Array:
    """Seeded by its name; scaled so that attention is peaked and logits spread by about 2."""
    # A checksum of the path, since Python's own hashes differ from process to process.
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    drawn = rng.standard_normal(shape)
    if "norm" in path or "scal" in path:
        drawn = 1 + 0.2 * drawn
    elif "bias" in path:
        drawn = 0.5 * drawn
    elif "head" in path:
        drawn = 2 * drawn / math.sqrt(shape[-1])
    elif "layers" in path or "soft" in path:
        of_layer = shape if re.search(r"\d", path) else shape[1:]  # separate layers have numbers
        inputs = math.prod(of_layer[:-1]) if "'o'" in path else of_layer[-2 if "expert" in path else 0]
        drawn = 1.5 * drawn / math.sqrt(inputs)
    return jnp.asarray(drawn.astype(np.float32))  # by numpy, as jax would compile it for each shape
