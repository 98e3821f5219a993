"""Methods that are another policy on block-causal models, where finished blocks are final."""

import functools

from dllm_jax.eviction import EvenHeads, UniformLayers
from dllm_jax.nn.mask import require_blocks
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.policies.evict_prompt import EvictPrompt
from dllm_jax.policies.maskkv import MaskKV
from dllm_jax.policies.parts.rolling_eviction import RollingEviction
from dllm_jax.policies.parts.sparse_blocks import SparseBlocks
from dllm_jax.policies.sparse_dllm import SparseDLLM


def for_model(policy: Policy, spec: ModelSpec) -> Policy:
    """Returns the policy that runs on a model: itself, unless the method means something else there.

    Raises:
      ValueError: the model's context is causal, where the method means nothing; or options that have no
        meaning on block-causal models.
    """
    if not spec.block_size or in_blocks.dispatch(type(policy)) is in_blocks.dispatch(object):
        return policy
    require_blocks(spec, type(policy).__name__, "Use Policy()")
    return in_blocks(policy)


@functools.singledispatch
def in_blocks(policy: Policy) -> Policy:
    """Returns the policy that runs on block-causal models in place of another."""
    return policy


@in_blocks.register
def _(policy: SparseDLLM) -> Policy:
    # Nothing is stale there: what would be evicted stays stored, and is not read.
    return SparseBlocks(float(policy.keep), policy.kernel, policy.delay)


@in_blocks.register
def _(policy: EvictPrompt) -> Policy:
    # Selecting again goes on: the budget is of all earlier blocks.
    if not (policy.reselect and type(policy.policy) is Policy):
        return policy
    if not isinstance(policy.heads, EvenHeads) or policy.layers != UniformLayers():
        raise ValueError(
            "reselect=True on block-causal models keeps as many KV pairs in every layer and head: "
            f"heads={policy.heads!r}, layers={policy.layers!r} are not supported. Use heads=EvenHeads() and "
            "layers=UniformLayers(), or reselect=False."
        )
    return RollingEviction(policy.budget, policy.votes)


@in_blocks.register
def _(policy: MaskKV) -> Policy:
    # Nothing refreshes prompt or response.
    budgets = policy.budget, policy.layers, policy.heads, policy.votes
    return in_blocks(EvictPrompt(*budgets, policy=Policy(), reselect=policy.reselect))
