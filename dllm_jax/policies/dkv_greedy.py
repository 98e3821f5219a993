"""dKV-Cache-Greedy (arXiv:2505.15781, section 3.4): the positions per step do not grow with the canvas."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt
from dllm_jax.policies.base import BY_DECIDED, Policy, with_mask_token
from dllm_jax.policies.dkv import RefreshInterval, interval
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import order_of
from dllm_jax.state.selection import best


@dataclasses.dataclass(frozen=True)
class DKVGreedy(Policy):
    """Recomputes the tokens that a step unmasks, those of the last step, and masked neighbors.

    Use it where the number of tokens that a partial step computes must not grow with the response; refreshes
    recompute the canvas. It needs to know the tokens to unmask (D_t) before the model runs, so it works with
    `RandomOrder`, or a sampler of yours that defines `planned`.

    Memory: Dense keys and values for all positions.

    Limits: Frequent refreshes (every second step in the paper) bound the speedup at 2x. A random order itself
    can cost accuracy.

    Attributes:
      refresh_every: Steps between full steps, counted within a block; None refreshes at its first step only.
        The paper uses 2.
      window: Number of masked neighbors recomputed with each center, both sides together. At most 6 in the
        paper.
      around: Centers of the windows: the tokens being unmasked ("next", the reference), or those just
        unmasked ("last", which the paper found better).

    Equals exact decoding when: refresh_every=1.
    Differences: The order is drawn step by step rather than once per block, which is the same distribution.
      Batches of unequal prompts work with a window too. The reference supports LLaDA only; with a shifted
      output head the positions that predict D_t are computed as well.
    """

    refresh_every: RefreshInterval = 2
    window: NonNegativeInt = 4
    around: Literal["next", "last"] = "next"

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything at a refresh, else D_{t-1}, D_t, the window, and what predicts D_t."""
        # D_{t-1} has new tokens to store, D_t needs logits.
        selected = canvas.just_decoded | canvas.planned
        assert canvas.planned_order is not None, "canvas.planned is known"
        order = canvas.planned_order if self.around == "next" else order_of(canvas.just_decoded)

        # The window: masked neighbors of the centers, chosen by each center in turn.
        near = neighbors(order, canvas.masked, selected, self.window)
        return (
            interval(canvas, self.refresh_every)
            | selected
            | near
            | canvas.predicting_positions(canvas.planned)
        )

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """D_t, D_{t-1}, the window, and the positions that predict D_t."""
        # The even schedule decodes at most `decoded` per step: D_t, D_{t-1}, predictors, and a window per
        # center.
        decoded = -(-layout.block // layout.steps_per_block)
        return (min(decoded * (3 + self.window), layout.length),)

    _in_blocks = with_mask_token(BY_DECIDED)


def neighbors(
    order: Int[Array, "b l"], masked: Bool[Array, "b l"], selected: Bool[Array, "b l"], size: int
) -> Bool[Array, "b l"]:
    """The `size` nearest masked positions of each center that are not selected yet, the left of two first.

    Args:
      order: Order in which the centers choose, from 0; -1 elsewhere.
      masked: positions that may be chosen.
      selected: positions that are computed in any case, the centers among them.
      size: positions per center, both sides together.
    """
    position = jnp.arange(order.shape[1])
    count = jnp.full(order.shape[:1], size, jnp.int32)

    # Centers choose one after the other, since none may choose a position that an earlier one has.
    def choose(i: Int[Array, ""], near: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        # Distance doubled, and one more to the right: of two equally near positions the left one is nearer.
        center = order == i
        offset = position - jnp.argmax(center, axis=1, keepdims=True)
        distance = 2 * jnp.abs(offset) + (offset > 0)

        # A sequence with fewer centers has none left, and chooses nothing.
        free = masked & ~selected & ~near & jnp.any(center, axis=1, keepdims=True)
        return near | best(jnp.where(free, -distance.astype(jnp.float32), -jnp.inf), count)

    # As many rounds as the sequence with most centers needs.
    nothing = jnp.zeros_like(selected)
    return jax.lax.fori_loop(0, jnp.max(order) + 1, choose, nothing) if size else nothing
