"""Blocks that end at a delimiter (AdaBlock-dLLM, arXiv:2509.26432): where, and with what they work."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.options import shown
from dllm_jax.policies.base import Policy
from dllm_jax.policies.fast_dllm import DualCache, PrefixCache
from dllm_jax.samplers import scores
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout


def in_window(canvas: Canvas) -> Bool[Array, "b l"]:
    """The masks that a block's first step may end the block after; none in later steps."""
    return canvas.masked & canvas.block & canvas.block_begins


def delimited_end(
    canvas: Canvas, index: Int[Array, "b c"], logits: Float[Array, "b c v"]
) -> Int[Array, "b"] | None:
    """The end of each sequence's block, which the block's first step sets; None where steps set none.

    Args:
      canvas: Canvas before the step.
      index: Positions of the logits, l = padding.
      logits: Those of the model, before constraints and filters.
    """
    if (rule := canvas.layout.adaptive) is None:
        return canvas.block_until
    layout, start = canvas.layout, canvas.block_start[:, None]
    is_delimiter = np.zeros(canvas.spec.vocab, bool)
    is_delimiter[list(rule.delimiters)] = True
    logits = logits.astype(jnp.float32)
    token = scores.likeliest(logits)
    searched = (index >= start) & (index < start + rule.searched(layout.end - layout.prompt))
    found = searched & (index < layout.end) & jnp.asarray(is_delimiter)[token]

    # The most probable delimiter, of equal ones the first.
    probability = jnp.where(found, scores.probability(logits, token), -jnp.inf)
    highest = jnp.max(probability, axis=1, keepdims=True)
    place = jnp.min(jnp.where(probability == highest, index, layout.length), axis=1)
    otherwise = jnp.minimum(canvas.block_start + rule.block, layout.end)
    end = jnp.where((highest[:, 0] > -jnp.inf) & (highest[:, 0] >= rule.threshold), place + 1, otherwise)
    assert canvas.block_until is not None, "such blocks"
    return jnp.where(canvas.active & canvas.block_begins[:, 0], end, canvas.block_until)


def check_adaptive(layout: Layout, policy: Policy, sampler: Sampler):
    """Raises ValueError if blocks end at delimiters and the policy, or the sampler, needs to know where."""
    name = f"block={shown(layout.adaptive)} is not supported by"
    if type(policy) is not Policy and not isinstance(policy, PrefixCache | DualCache):
        raise ValueError(
            f"{name} {type(policy).__name__}: the first step of a block must predict every position that may "
            "end it. Use Policy(), PrefixCache() or DualCache()."
        )
    if not isinstance(sampler, UntilDone) or sampler.revises:
        raise ValueError(
            f"{name} {type(sampler).__name__}: it needs to know how many positions a block has, or revises "
            "them. Use Threshold(), or another sampler that stays until nothing in the block is masked."
        )
