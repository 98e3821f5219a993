"""Rows: the positions that go through the network in one step, as indices of a static width.

With guidance each sequence has two streams, which lie side by side: a conditional and an unconditional one.
"""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Shaped

from dllm_jax.nn.mask import Mask
from dllm_jax.xla.reductions import FEW, place_by_comparison
from pallas_kernels.topk_evict.xla import listed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The positions that one denoising step computes, as an array of static width; the rest of it is padding.

    Attributes:
      index: position of each entry, ascending but in a ring; `length` = padding, which may stand anywhere,
        reads anything and writes nothing.
      length: positions of the canvas, or slots of the store that `index` counts (static).
      in_place: Entry i is position `start` + i or padding (static): the last q positions, where they lie, so
        that nothing is gathered, nor scattered if they are all. Never inferred from the width.
      in_one_block: Whether a sequence's entries lie in one of the model's own blocks (static), so that they
        attend to the same keys.
      phase: Kind of the partial step, the name of one of `Policy.phases` (static); "" in full steps.
    """

    index: Int[Array, "b q"]
    length: int = dataclasses.field(metadata={"static": True})
    in_place: bool = dataclasses.field(default=False, metadata={"static": True})
    in_one_block: bool = dataclasses.field(default=False, metadata={"static": True})
    phase: str = dataclasses.field(default="", metadata={"static": True})

    @property
    def full(self) -> bool:
        """Whether entry i is position i, of the whole canvas: the rows of a full step."""
        return self.in_place and self.start == 0

    @property
    def start(self) -> int:
        """Position of the first entry, in place; negative if a store has fewer slots than there are rows."""
        return self.length - self.index.shape[1]

    @property
    def real(self) -> Bool[Array, "b q"]:
        """Marks entries that are positions, not padding."""
        return self.index < self.length

    @property
    def positions(self) -> Int[Array | np.ndarray, "b q"]:
        """Position of each entry, of padding any: in place known on the host, else `index`."""
        if not self.in_place:
            return self.index
        return np.broadcast_to(np.arange(self.start, self.length, dtype=np.int32), self.index.shape)

    def mask(self) -> Bool[Array, "b l"]:
        """The rows as a set of positions."""
        if self.in_place:
            return jnp.pad(self.real, ((0, 0), (max(self.start, 0), 0)))[:, max(-self.start, 0) :]
        return places(self.index, self.length) < self.index.shape[1]

    def take(self, x: Shaped[Array, "b l *d"]) -> Shaped[Array, "b q *d"]:
        """Returns x at the computed positions; values at padding must not be used."""
        if not self.in_place:
            return gather(x, self.index)
        if self.start < 0:
            return jnp.pad(x, ((0, 0), (-self.start, 0), *((0, 0),) * (x.ndim - 2)))
        return x[:, self.start :]

    def keys(self, mask: Mask | None) -> Bool[Array, "#b #k #q width"]:
        """Marks the rows that each query attends to, from a mask over canvas positions [b #k #q l].

        None lets every query attend to every computed position.
        """
        real = self.real[:, None, None]
        if mask is None or self.in_place:
            return real if mask is None else mask[..., self.start :] & real
        column = jnp.minimum(self.index, mask.shape[3] - 1)[:, None, None]
        column = jnp.broadcast_to(column, (*mask.shape[:3], column.shape[3]))
        return jnp.take_along_axis(mask, column, axis=3) & real

    def put(self, x: Shaped[Array, "b l *d"], values: Shaped[Array, "b q *d"]) -> Shaped[Array, "b l *d"]:
        """x with values at the computed positions."""
        # By a scatter where these are fewer positions than x has, as `dllm_jax.xla.stacks.put_slots`.
        if not self.in_place or self.start > 0:
            return scatter(x, self.index, values)
        first = -self.start
        real, new = self.real[:, first:], values[:, first:].astype(x.dtype)
        return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), new, x)

    def spread(self, values: Shaped[Array, "b q *d"]) -> Shaped[Array, "b l *d"]:
        """The values at the computed positions, and zeros elsewhere; in place, padding has its own values."""
        if self.in_place:
            return jnp.pad(values, ((0, 0), (self.start, 0), *((0, 0),) * (values.ndim - 2)))
        return self.put(jnp.zeros((len(values), self.length, *values.shape[2:]), values.dtype), values)

    def slot(self, position: Int[Array, "b c"]) -> Int[Array, "b c"]:
        """The place of each position in `index`; q if it is not among the rows."""
        # In place a position's place is known, if it is computed.
        q = self.index.shape[1]
        if self.in_place:
            computed = gather(self.mask(), position) & (position < self.length)
            return jnp.where(computed, position - self.start, q)
        if q <= FEW:
            return jnp.where(position < self.length, place_by_comparison(self.index, position), q)
        return jnp.where(position < self.length, gather(places(self.index, self.length), position), q)

    def where(self, chosen: Bool[Array, "b q"]) -> "Rows":
        """The same entries, those that are not chosen turned into padding."""
        return dataclasses.replace(self, index=jnp.where(chosen, self.index, self.length))

    def at(self, places: "Rows") -> "Rows":
        """The entries at these places of the rows; a place that is padding is padding."""
        index = jnp.pad(self.index, ((0, 0), (0, 1)), constant_values=self.length)
        index = jnp.take_along_axis(index, places.index, axis=1)
        return Rows(index, self.length, in_one_block=self.in_one_block)

    def last(self, slots: int) -> "Rows":
        """The rows as slots of a store that holds the last `slots` positions; all others are padding."""
        if slots == self.length:
            return self
        before = self.length - slots
        slot = jnp.where(self.real & (self.positions >= before), self.positions - before, slots)
        return Rows(slot, slots, self.in_place)

    def in_ring(self, slots: int) -> "Rows":
        """The rows as slots of a ring, of which position p has slot p % slots until a later one takes it."""
        newest = jnp.max(jnp.where(self.real, self.index, 0), axis=1, keepdims=True)
        stays = self.real & (self.positions > newest - slots)
        return Rows(jnp.where(stays, self.positions % slots, slots), slots)


def full_rows(need: Bool[Array, "b l"]) -> Rows:
    """The rows of a full step: the needed positions where they lie on the canvas, padding elsewhere."""
    return last_rows(need, need.shape[1])


def last_rows(need: Bool[Array, "b l"], width: int) -> Rows:
    """The needed ones of the last `width` positions where they lie on the canvas, padding elsewhere."""
    length, start = need.shape[1], need.shape[1] - width
    index = jnp.where(need[:, start:], jnp.arange(start, length, dtype=jnp.int32), length)
    return Rows(index, length, in_place=True)


def compact_rows(need: Bool[Array, "b l"], width: int) -> Rows:
    """The first `width` needed positions of each sequence, padded."""
    return Rows(compact(need, width), need.shape[1])


def order_of(mask: Bool[Array, "b l"]) -> Int[Array, "b l"]:
    """The place of each True position among those of its sequence, from left to right; -1 elsewhere."""
    return jnp.where(mask, jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, -1)


def compact(mask: Bool[Array, "b l"], width: int) -> Int[Array, "b {width}"]:
    """The first `width` True positions of each sequence in ascending order, padded with l."""
    return listed(mask, width)


def gather(x: Shaped[Array, "b l *d"], index: Int[Array, "b q"]) -> Shaped[Array, "b q *d"]:
    """Reads positions; padding (index l) reads the last one, a value that must not be used."""
    # Out of bounds, `take_along_axis` would give NaN, which no mask hides from a sum.
    index = jnp.minimum(index, x.shape[1] - 1)
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def scatter(
    canvas: Shaped[Array, "b l *d"], index: Int[Array, "b q"], values: Shaped[Array, "b q *d"]
) -> Shaped[Array, "b l *d"]:
    """Writes values at their positions; padding (index l) is dropped."""
    return canvas.at[jnp.arange(index.shape[0])[:, None], index].set(values.astype(canvas.dtype), mode="drop")


def places(index: Int[Array, "b q"], length: int) -> Int[Array, "b {length}"]:
    """The place of each position in `index`, q if it is not there: its inverse."""
    b, q = index.shape
    if 0 < q <= FEW:
        return place_by_comparison(index, jnp.arange(length, dtype=jnp.int32)[None])
    place = jnp.broadcast_to(jnp.arange(q, dtype=jnp.int32), index.shape)
    return scatter(jnp.full((b, length), q, jnp.int32), index, place)


def marked(position: Int[Array, "b ..."], length: int) -> Bool[Array, "b {length}"]:
    """Marks the positions of a list, whose padding is the length."""
    flat = position.reshape(len(position), -1)
    return (
        jnp.zeros((len(flat), length), bool).at[jnp.arange(len(flat))[:, None], flat].set(True, mode="drop")
    )


def spread(
    values: Shaped[Array, "b q"], place: Int[Array, "b l"], otherwise: ArrayLike
) -> Shaped[Array, "b l"]:
    """The values on the canvas, given each position's place among them (`places`); `otherwise` elsewhere."""
    return jnp.where(place < values.shape[1], gather(values, place), otherwise)


def first_of(positions: Bool[Array, "b l"], otherwise: int) -> Int[Array, "b"]:
    """The first position of each set; of an empty one `otherwise`, which lies after all of them."""
    return jnp.min(jnp.where(positions, jnp.arange(positions.shape[1]), otherwise), axis=1).astype(jnp.int32)


# -- streams of a sequence ------------------------------------------------------------------------------


Streamed = TypeVar("Streamed")  # an array or a pytree of them


def repeat(tree: Streamed, streams: int) -> Streamed:
    """Arrays of sequences with each sequence once per stream (conditional and unconditional, for guidance).

    The streams of a sequence are neighbors: over a mesh, they lie on the same devices.
    """
    if streams == 1:
        return tree
    return jax.tree.map(lambda a: jnp.repeat(a, streams, axis=0), tree)


def one_stream(array: Shaped[Array, "streams_b ..."], index: int, streams: int) -> Shaped[Array, "b ..."]:
    """One of the streams that `repeat` put side by side, 0 the conditional one."""
    if streams == 1:
        return array
    return array.reshape(-1, streams, *array.shape[1:])[:, index]
