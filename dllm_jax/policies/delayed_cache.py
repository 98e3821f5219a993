"""The delayed cache of block-causal models, a part of FOCUS (arXiv:2601.23278)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.mask import require_blocks
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import BY_DECIDED, Policy, halvings, with_mask_token
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class DelayedCache(Policy):
    """Recomputes a token of the block until it and its right neighbor have been computed unmasked.

    Use it on block-causal models where the number of computed tokens limits a step: large batches, long
    blocks.

    The first step of a model's block computes all of it. Later steps leave out a token if it and its right
    neighbor were unmasked before the previous step; the last token needs no neighbor. The final keys and
    values of a block are computed with the next block's first step, as in exact decoding.

    Memory: Dense keys and values for all positions.

    Limits: It saves little in short blocks, and while unmasked tokens have masks as right neighbors.

    Equals exact decoding when: every block of the model takes one step.
    Differences: The reference stores a finished block as it is, with approximate keys and values; here they
      are computed exactly.
    """

    _in_blocks = with_mask_token(BY_DECIDED)

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        require_blocks(spec, type(self).__name__, "Use DKVDecode()")
        return super().init(spec, layout, batch, dtype)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The block's tokens that are not reusable; if all are, the whole block."""
        open_ = canvas.in_model_block & ~reusable(canvas)
        return open_ | ~jnp.any(open_, axis=1, keepdims=True)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The model's block, a half and a quarter of it."""
        return halvings(max(spec.context.size, 1), smallest=1)[-3:]


def reusable(canvas: Canvas) -> Bool[Array, "b l"]:
    """Positions of the model's block that the previous step computed with their last token and neighbor."""
    known = canvas.valid & ~canvas.masked & ~canvas.just_decoded
    last = canvas.position == canvas.model_block_end - 1
    return known & (jnp.pad(known[:, 1:], ((0, 0), (0, 1)), constant_values=True) | last)
