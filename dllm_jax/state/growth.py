"""The length of answers that grow: what of the canvas exists."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Growth(NamedTuple):
    """Lengths of the answers, and how they have changed.

    Positions of the canvas from `end` on do not exist: nothing attends to them, and no step computes them.

    Attributes:
      end: Position after the answer, or after the template that holds it.
      limit: Largest position that `end` may be moved to.
      growing: Sequences whose answer grows before it is decoded.
      confidence: Confidence in the end of the answer, of the last step that knew it.
      source: Position at which each position of the canvas was before the last step.
      inserted: Mask that became several in the last step, by its position before; -1 if none did.
      removed: Positions that the last step removed, where they were before.
      insertions: Number of insertions so far.
      removals: Number of positions removed so far.
      growth_steps: Number of steps that only changed the length.
      wanted_more: Whether an answer at its maximum was to grow.
      positions: Existing positions, summed over the steps so far.
    """

    end: Int[Array, "b"]
    limit: Int[Array, "b"]
    growing: Bool[Array, "b"]
    confidence: Float[Array, "b"]
    source: Int[Array, "b l"]
    inserted: Int[Array, "b"]
    removed: Bool[Array, "b l"]
    insertions: Int[Array, "b"]
    removals: Int[Array, "b"]
    growth_steps: Int[Array, "b"]
    wanted_more: Bool[Array, "b"]
    positions: Int[Array, "b"]

    @staticmethod
    def begin(end: int, limit: Int[Array, "b"], length: int) -> "Growth":
        """Before the first step of answers that all end at one position, on a canvas of `length`."""
        zeros, no = jnp.zeros_like(limit), jnp.zeros(limit.shape, bool)
        source = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (len(limit), length))
        return Growth(
            end=zeros + end,
            limit=limit,
            growing=~no,
            confidence=zeros.astype(jnp.float32),
            source=source,
            inserted=zeros - 1,
            removed=jnp.zeros(source.shape, bool),
            insertions=zeros,
            removals=zeros,
            growth_steps=zeros,
            wanted_more=no,
            positions=zeros,
        )

    def exist(self, position: Int[Array, "l"]) -> Bool[Array, "b l"]:
        """The positions in front of the end."""
        return position < self.end[:, None]
