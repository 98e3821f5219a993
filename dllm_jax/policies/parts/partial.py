"""Partial updates inside a layer: which rows change, in what width they run, and where they are stored."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from dllm_jax.state import selection
from dllm_jax.state.cache import LayerView
from dllm_jax.state.rows import Rows, compact, gather

Carry = TypeVar("Carry")


def lowest(score: Float[Array, "b q"], among: Bool[Array, "b q"], share: float) -> Bool[Array, "b q"]:
    """The int(count * share) lowest scores among `count` marked rows of each sequence; ties: lowest index."""
    count = selection.share(jnp.sum(among, axis=1), share, score.shape[1])
    return selection.best(jnp.where(among, -score, -jnp.inf), count)


def run_narrowest(
    marked: Bool[Array, "b q"], widths: tuple[int, ...], rows: Rows, length: int, body: Callable, carry: Carry
) -> Carry:
    """Runs `body(index, rows, carry)` once over the marked rows, in the narrowest width that holds them.

    Runs nothing if no row is marked. Each width is a loop of one trip: the branches of a `lax.switch` would
    copy the caches they write.

    Args:
      marked: rows to run.
      widths: ascending; the last must hold every row.
      rows: the rows that `marked` refers to.
      length: canvas positions.
      body: `index` holds places in `rows` (its width where padding), `rows` the positions there.
      carry: threaded through.
    """
    most, narrower = jnp.max(jnp.sum(marked, axis=1)), jnp.int32(0)
    position = jnp.pad(rows.index, ((0, 0), (0, 1)), constant_values=length)
    for width in widths:
        index = compact(marked, width)
        some = Rows(jnp.take_along_axis(position, index, axis=1), whole=False)
        trips = ((most > narrower) & (most <= width)).astype(jnp.int32)
        carry = jax.lax.fori_loop(
            0, trips, lambda _, carry, index=index, some=some: body(index, some, carry), carry
        )
        narrower = jnp.int32(width)
    return carry


def tail_slot(index: Int[Array, "b q"], slots: int, length: int) -> Int[Array, "b q"]:
    """Slots of positions in a store of the last `slots` of `length` positions; `slots` for all others."""
    slot = index - (length - slots)
    return jnp.where(slot >= 0, slot, slots)


def put_tail(
    stack: Shaped[Array, "n b t *d"],
    layer: Int[Array, ""],
    index: Int[Array, "b q"],
    length: int,
    rows: Shaped[Array, "b q *d"],
) -> Shaped[Array, "n b t *d"]:
    """Writes rows into a store of the canvas's last t positions, dropping the others."""
    slots = Rows(tail_slot(index, stack.shape[2], length), whole=False)
    return LayerView(stack, layer).update(slots, rows)[0].stack


def take_tail(
    stack: Shaped[Array, "n b t *d"], layer: Int[Array, ""], index: Int[Array, "b q"], length: int
) -> Shaped[Array, "b q *d"]:
    """Reads rows from a store of the canvas's last t positions; meaningless for the others."""
    slots = tail_slot(index, stack.shape[2], length)
    return gather(LayerView(stack, layer).read(), slots)
