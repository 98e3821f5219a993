"""Rows: the positions that go through the network in one step, as indices of a static width."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


class Rows(NamedTuple):
    """Which canvas positions are computed.

    Attributes:
      index: position of each row, ascending; l = padding, dropped on write.
      whole: static; this is the full canvas in order (for the rows of the batch that are active).
        Never inferred from the width.
    """

    index: Int[Array, "b q"]
    whole: bool

    def take(self, x: Shaped[Array, "b l *d"]) -> Shaped[Array, "b q *d"]:
        """x at the rows; padding rows read position l-1, and their value is never used."""
        return x if self.whole else gather(x, self.index)

    def mask(self, length: int) -> Bool[Array, "b l"]:
        """The rows as a set of positions."""
        batch = jnp.arange(self.index.shape[0])[:, None]
        return jnp.zeros((batch.shape[0], length), bool).at[batch, self.index].set(True, mode="drop")

    def slot(self, position: Int[Array, "b c"], length: int) -> Int[Array, "b c"]:
        """The place of each position in `index`; q if it is not among the rows."""
        if self.whole:
            return jnp.where(position < length, position, self.index.shape[1])
        b, q = self.index.shape
        inverse = jnp.full((b, length + 1), q, jnp.int32)
        inverse = inverse.at[jnp.arange(b)[:, None], self.index].set(jnp.arange(q, dtype=jnp.int32)[None])
        inverse = inverse.at[:, length].set(q)
        return jnp.take_along_axis(inverse, position, axis=1)


def whole_rows(active: Bool[Array, "b"], length: int) -> Rows:
    """Every position of the active rows; inactive rows are all padding."""
    index = jnp.where(active[:, None], jnp.arange(length, dtype=jnp.int32)[None], length)
    return Rows(index, whole=True)


def compact(mask: Bool[Array, "b l"], width: int) -> Int[Array, "b {width}"]:
    """The first `width` True positions of each row in ascending order, padded with l."""
    b, length = mask.shape
    rank = jnp.cumsum(mask, axis=1) - 1
    target = jnp.where(mask & (rank < width), rank, width)
    index = jnp.full((b, width + 1), length, jnp.int32)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), mask.shape)
    return index.at[jnp.arange(b)[:, None], target].set(position)[:, :width]


def gather(x: Shaped[Array, "b l *d"], index: Int[Array, "b q"]) -> Shaped[Array, "b q *d"]:
    """Reads rows at their positions; padding (index l) reads the last one, a value that must not be used."""
    index = jnp.minimum(index, x.shape[1] - 1)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def scatter(
    canvas: Shaped[Array, "b l *d"], index: Int[Array, "b q"], rows: Shaped[Array, "b q *d"]
) -> Shaped[Array, "b l *d"]:
    """Writes rows at their positions; padding (index l) is dropped."""
    return canvas.at[jnp.arange(index.shape[0])[:, None], index].set(rows.astype(canvas.dtype), mode="drop")
