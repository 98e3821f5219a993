"""Rows sorted by expert and divided into tiles, so that a tile has one expert."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class Tiles(NamedTuple):
    """The rows of each tile, in the order of experts; a tile that there is not ends before it begins.

    Attributes:
      order: numbers of all rows, sorted by expert.
      expert: Expert of each tile.
      first: its first row's place in `order`.
      end: the place after its last one.
    """

    order: Int[Array, "r"]
    expert: Int[Array, "n"]
    first: Int[Array, "n"]
    end: Int[Array, "n"]


def tiles_of(expert: Int[Array, "r"], count: int, rows: int) -> Tiles:
    """Tiles of at most so many `rows`; `expert` of each row is `count` where it is not here."""
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(expert, length=count + 1)[:count].astype(jnp.int32)
    ends, tiles = jnp.cumsum(sizes), -(-sizes // rows)
    behind = jnp.cumsum(tiles)

    tile = jnp.arange(most_tiles(len(expert), count, rows), dtype=jnp.int32)
    of = jnp.searchsorted(behind, tile, side="right", method="compare_all").astype(jnp.int32)
    real, of = of < count, jnp.minimum(of, count - 1)
    first = (ends - sizes)[of] + (tile - (behind - tiles)[of]) * rows
    end = jnp.minimum(ends[of], first + rows)
    return Tiles(order, of, first, jnp.where(real, end, 0))


def most_tiles(length: int, count: int, rows: int) -> int:
    """The largest number of tiles of at most so many `rows`, for `length` rows sent to `count` experts."""
    # A tile is not full only where its expert has no more rows: at most once for each expert with a row.
    used = min(count, length)
    return used + (length - used) // rows
