"""Positions whose KV pairs a policy has evicted, which traces and reports show as not attended to."""

import functools

from jaxtyping import Array, Bool

from dllm_jax.policies.base import Policy
from dllm_jax.policies.evict_prompt import EvictPrompt
from dllm_jax.policies.maskkv import MaskKV
from dllm_jax.policies.parts.rolling_eviction import RollingEviction
from dllm_jax.policies.sparse_dllm import SparseDLLM
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas


@functools.singledispatch
def evicted(policy: Policy, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"] | None:
    """Marks positions without a stored pair in any layer; None if the policy evicts nothing.

    A step attends to such a position only if it computes it. A policy of your own that evicts can register
    its function by `evicted.register`; otherwise traces show what `Policy.reads` says.
    """
    return None


@evicted.register
def _(policy: EvictPrompt, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
    return policy.packed(canvas) & ~cache.shared.pairs.positions(canvas.layout.length)


@evicted.register
def _(policy: MaskKV, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
    return canvas.prompt & ~cache.shared.positions(canvas.layout.length)


@evicted.register
def _(policy: RollingEviction, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
    return canvas.before_model_block & ~cache.shared


@evicted.register
def _(policy: SparseDLLM, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
    return canvas.valid & ~cache.shared
