"""DSB's cache: the block and what it has just left are recomputed (released code, lizhuo-luo/DSB)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt
from dllm_jax.policies.base import Policy, halvings
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas, first_of
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class SlidingCache(Policy):
    """`DualCache` for blocks that slide: recomputes the block and at least `window` positions before it.

    Everything is recomputed when a round begins, which with `block=Sliding(32)` is whenever 32 tokens have
    been decoded; in other steps the block, and before it all that it has moved on by, or `window` if that is
    more. So tokens are stored once more after they have been decoded. With fixed blocks a round is a block.

    Exact limit: one step per block, or in all if it slides.
    Departures: batches, padding and a shifted head work, for which the positions that predict the block are
    recomputed. The released code's window behind the block is left out: it decodes there what it should not.

    Attributes:
      window: positions before the block that are recomputed with it; 0 is `DualCache`, if blocks are fixed.
    """

    window: NonNegativeInt = 24

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything when a round begins, else what predicts the block, and what lies just before it."""
        # The block began at the first of what was masked before the last step.
        start = first_of(canvas.masked | canvas.just_decoded, canvas.layout.length)
        moved = canvas.block_start - jnp.maximum(start, canvas.layout.prompt)
        reach = canvas.block_start - jnp.maximum(moved, self.window)
        near = ~canvas.suffix & (canvas.position >= reach[:, None])
        return canvas.block_begins | near | canvas.predicting_positions(canvas.block)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """A block and the window, twice as much, and so on as far as blocks become longer."""
        before = self.window + int(spec.shifted)
        return tuple(block + before for block in halvings(layout.widest_block, smallest=layout.block)[:3])
