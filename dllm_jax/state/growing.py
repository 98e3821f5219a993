"""Answers that grow: their lengths, and their changes: the end moves, masks are inserted, positions removed.

What follows a change moves by one gather over all arrays that have a position axis.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import compact, gather
from dllm_jax.xla.reductions import count_marked


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowingCanvas(Canvas):
    """Sequences whose answers change their length.

    Attributes:
      growth: Lengths of the answers.
    """

    growth: Growth

    @override
    def without_final(self, selected: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
        """The selection as far as answers reach."""
        return selected & self.valid


def growing(canvas: Canvas) -> GrowingCanvas:
    """The canvas as one of answers that grow, which it is."""
    assert isinstance(canvas, GrowingCanvas), "answers grow"
    return canvas


def growth_of(canvas: Canvas) -> Growth:
    """The lengths of answers that grow."""
    return growing(canvas).growth


def with_ends(canvas: Canvas, tokens: Int[Array, "b l"]) -> Int[Array, "b l"]:
    """The tokens, with end-of-text after answers that could have grown further."""
    if not isinstance(canvas, GrowingCanvas):
        return tokens
    return jnp.where(canvas.growth.exist(canvas.position), tokens, canvas.spec.eos_id)


def with_growth(canvas: Canvas, growth: Growth, moved: Bool[Array, "b"]) -> Canvas:
    """The canvas with other lengths; sequences that moved begin their block again, by a full step."""
    reached = canvas.valid | ~growth_of(canvas).exist(canvas.position)
    valid = jnp.where(moved[:, None], reached & growth.exist(canvas.position), canvas.valid)
    block_step = jnp.where(moved, 0, canvas.block_step)
    return dataclasses.replace(growing(canvas), valid=valid, block_step=block_step, growth=growth)


def insert(canvas: Canvas, at: Int[Array, "b"], more: int, inserts: Bool[Array, "b"]) -> Canvas:
    """The canvas in which masks have become several: the mask stays, and more follow it.

    Args:
      canvas: Canvas after the step's tokens.
      at: Position of a mask of each sequence.
      more: Number of masks to insert after it. What they move beyond the limit is lost.
      inserts: Sequences that this is for.
    """
    growth, position, length = growth_of(canvas), canvas.position, canvas.layout.length
    first = jnp.where(inserts, at, length)[:, None]
    new = (position > first) & (position <= first + more)
    source = jnp.where(position > first + more, position - more, position).astype(jnp.int32)
    changed = growth._replace(
        end=jnp.where(inserts, jnp.minimum(growth.end + more, growth.limit), growth.end),
        source=source,
        inserted=jnp.where(inserts, at, -1),
        insertions=growth.insertions + inserts,
    )
    stop = canvas.stop
    if stop is not None:
        later = jnp.minimum(stop.position + more, length)
        stop = stop._replace(position=jnp.where(inserts & (stop.position > at), later, stop.position))
    moved = dataclasses.replace(
        canvas,
        tokens=jnp.where(new, canvas.spec.mask_id, gather(canvas.tokens, source)),
        decoded_at=jnp.where(new, -1, gather(canvas.decoded_at, source)),
        stop=stop,
    )
    return with_growth(moved, changed, inserts)


def remove(canvas: Canvas, gone: Bool[Array, "b l"]) -> Canvas:
    """The canvas without these positions of its answers; what follows moves to the left.

    Args:
      canvas: Canvas after the step's tokens. Nothing was inserted into sequences that lose positions.
      gone: Positions to remove.
    """
    growth, position, length = growth_of(canvas), canvas.position, canvas.layout.length
    count = count_marked(gone)
    removes, left = count > 0, length - count[:, None]
    source = jnp.where(position < left, compact(~gone, length), position).astype(jnp.int32)
    source = jnp.where(removes[:, None], source, growth.source)
    changed = growth._replace(
        end=growth.end - count, source=source, removed=gone, removals=growth.removals + count
    )
    absent = removes[:, None] & ~changed.exist(position)
    origin = jnp.where(removes[:, None], source, position)
    moved = dataclasses.replace(
        canvas,
        tokens=jnp.where(absent, canvas.spec.mask_id, gather(canvas.tokens, origin)),
        decoded_at=jnp.where(absent, -1, gather(canvas.decoded_at, origin)),
    )
    return with_growth(moved, changed, removes)
