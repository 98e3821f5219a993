"""Changes of an answer's length on the canvas: its end moves, masks are inserted, positions are removed.

What follows a change moves by one gather over all arrays that have a position axis.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.state.canvas import Canvas, Growth
from dllm_jax.state.rows import compact, gather
from dllm_jax.xla.reductions import count_marked


def growth_of(canvas: Canvas) -> Growth:
    """The lengths of answers that grow."""
    assert canvas.growth is not None, "answers grow"
    return canvas.growth


def with_growth(canvas: Canvas, growth: Growth, moved: Bool[Array, "b"]) -> Canvas:
    """The canvas with other lengths; sequences that moved begin their block again, by a full step."""
    reached = canvas.valid | ~growth_of(canvas).exist(canvas.position)
    valid = jnp.where(moved[:, None], reached & growth.exist(canvas.position), canvas.valid)
    block_step = jnp.where(moved, 0, canvas.block_step)
    return dataclasses.replace(canvas, valid=valid, block_step=block_step, growth=growth)


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
        stop = jnp.where(inserts & (stop > at), jnp.minimum(stop + more, length), stop)
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
    own = jnp.where(removes[:, None], source, position)
    moved = dataclasses.replace(
        canvas,
        tokens=jnp.where(absent, canvas.spec.mask_id, gather(canvas.tokens, own)),
        decoded_at=jnp.where(absent, -1, gather(canvas.decoded_at, own)),
    )
    return with_growth(moved, changed, removes)
