"""DSB's cache (arXiv:2602.05992): the block and what it has just left are recomputed (lizhuo-luo/DSB)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt
from dllm_jax.policies.base import BY_PARTS, Policy, halvings, with_mask_token
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import first_of


@dataclasses.dataclass(frozen=True)
class SlidingCache(Policy):
    """Recomputes a sliding block and at least `window` tokens before it (DSB).

    Use it with `block=Sliding(32)`. With fixed blocks it is `DualCache` with a window.

    A full step starts each round. With `block=Sliding(32)` a round ends when 32 tokens are unmasked. Other
    steps recompute the block and the tokens that it has just left, or `window` tokens if these are more. So
    tokens are cached again after they are unmasked.

    Memory: Dense keys and values for all positions.

    Limits: At one token per step it computes more tokens than `DualCache`, but with window=0 in fixed blocks.

    Equals exact decoding when: every block takes one step; if it slides, when the response takes one step.
    Differences: Batches, padding and a shifted output head work. The reference's window after the block is
      left out, because it unmasks tokens that it should not.

    Attributes:
      window: Minimum number of tokens before the block that are recomputed with it. 0 is `DualCache` with
        fixed blocks.
    """

    window: NonNegativeInt = 24

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects everything when a round begins, else what predicts the block and the tokens before it."""
        # The block began at the first of what was masked before the last step.
        start = first_of(canvas.masked | canvas.just_decoded, canvas.layout.length)
        moved = canvas.block_start - jnp.maximum(start, canvas.layout.prompt)
        reach = canvas.block_start - jnp.maximum(moved, self.window)
        near = ~canvas.suffix & (canvas.position >= reach[:, None])
        return canvas.block_begins | near | canvas.predicting_positions(canvas.block)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The window, and with it a block, about two or four of them as far as blocks become longer."""
        before = self.window + int(spec.shifted)
        return tuple(block + before for block in halvings(layout.widest_block, smallest=layout.block)[:3])

    _in_blocks = with_mask_token(BY_PARTS)
