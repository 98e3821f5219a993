"""Storage of the kept prompt pairs: one flat array of slots for all layers and heads, sized by the budget."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.layer import Layer, LayerIndex


class PairStore(NamedTuple):
    """Pairs of all layers and kv heads stored back to back, each head's in order of position.

    Attributes:
      k: rotated keys.
      v: values.
      position: prompt position of each pair.
      start: first slot of each layer and head.
      length: slots of each layer and head.
      budget: slots of each layer, per kv head.
    """

    k: Float[Array, "b s d"]
    v: Float[Array, "b s d"]
    position: Int[Array, "b s"]
    start: Int[Array, "n b k"]
    length: Int[Array, "n b k"]
    budget: Int[Array, "n b"]

    def slots(
        self, layer: LayerIndex, width: int, first: int | Int[Array, ""] = 0
    ) -> tuple[Int[Array, "b k w"], Bool[Array, "b k w"]]:
        """Slots of a layer's heads from each one's `first` on, padded to `width`, and which are real.

        Args:
          layer: index of the layer.
          width: slots per head, static.
          first: place in each head's run at which to begin.
        """
        # Padding has the first index behind the store: writes drop it, reads must clip it.
        order = first + jnp.arange(width)
        real = order < self.length[layer][..., None]
        return jnp.where(real, self.start[layer][..., None] + order, self.k.shape[1]), real

    def read(
        self, layer: LayerIndex, width: int, first: int | Int[Array, ""] = 0
    ) -> tuple[Array, Array, Bool[Array, "b k 1 w"]]:
        """Keys and values [b w k d] of one layer from each head's `first` on, padded, and which are real.

        Arguments are those of `slots`. Padding holds any pair of the store: the mask must hide it.
        """
        slots, real = self.slots(layer, width, first)

        # Gathered per head [b k w d], then laid out as a layer's keys and values are.
        take = lambda a: jnp.swapaxes(a[_sequence(slots), self._clipped(slots)], 1, 2)
        return take(self.k), take(self.v), real[:, :, None]

    def positions(self, layer: LayerIndex, width: int) -> Int[Array, "b k w"]:
        """Prompt positions of one layer's pairs, padded as in `read`; meaningless at padding."""
        slots, _ = self.slots(layer, width)
        return self.position[_sequence(slots), self._clipped(slots)]

    def kept(self, prompt: int) -> Bool[Array, "b {prompt}"]:
        """Prompt positions of which any head of any layer keeps the pair."""
        # A slot holds a pair if it lies in a head's run: runs begun before it, less those that have ended.
        by_sequence = lambda a: jnp.moveaxis(a, 1, 0).reshape(a.shape[1], -1)
        start, length = by_sequence(self.start), by_sequence(self.length)
        sequence, some = jnp.arange(len(start))[:, None], (length > 0).astype(jnp.int32)
        changes = jnp.zeros((len(start), self.k.shape[1] + 1), jnp.int32)
        changes = changes.at[sequence, start].add(some).at[sequence, start + length].add(-some)
        held = jnp.cumsum(changes, axis=1)[:, :-1] > 0
        place = jnp.where(held, self.position, prompt)
        return jnp.zeros((len(start), prompt), bool).at[sequence, place].set(True, mode="drop")

    def allot(
        self,
        layer: LayerIndex,
        first: Int[Array, "b"],
        position: Int[Array, "b k w"],
        prompt: int,
        where: Bool[Array, "b 1"],
    ) -> "PairStore":
        """Assigns slots to the positions that one layer's heads keep.

        Args:
          layer: index of the layer.
          first: the layer's first slot in each sequence.
          position: kept prompt positions of each head, ascending, padded with `prompt`.
          prompt: prompt positions.
          where: sequences to assign in; the others keep what they have.
        """
        # The heads' runs lie back to back, each as long as its number of kept positions.
        kept = position < prompt
        length = jnp.sum(kept, axis=-1)
        start = first[:, None] + jnp.cumsum(length, axis=1) - length
        put = lambda a, new: a.at[layer].set(jnp.where(where, new, a[layer]).astype(a.dtype))

        # A kept position's slot is its place in its head's run; padding is written nowhere.
        slot = start[..., None] + jnp.arange(position.shape[-1])
        slot = jnp.where(kept & where[..., None], slot, self.k.shape[1])
        return self._replace(
            start=put(self.start, start),
            length=put(self.length, length),
            position=self.position.at[_sequence(slot), slot].set(position, mode="drop"),
        )

    def renew(
        self,
        layer: Layer,
        k: Float[Array, "b p k d"],
        v: Float[Array, "b p k d"],
        width: int,
        where: Bool[Array, "b 1"],
    ) -> "PairStore":
        """Overwrites the kept pairs of one layer with newly computed ones of the same prompt positions.

        Args:
          layer: the layer, which gathers the pairs.
          k: new rotated keys of the prompt.
          v: new values of the prompt.
          width: upper bound of the pairs of a head.
          where: sequences to overwrite in.
        """
        # All other sequences' slots are turned into padding, which the write drops.
        slots, _ = self.slots(layer.index, width)
        slots = jnp.where(where[..., None], slots, self.k.shape[1])
        kept = layer.sparse_gather(k, v, self.positions(layer.index, width))

        # By head, as the slots are.
        by_head = [jnp.swapaxes(new, 1, 2) for new in kept]
        put = lambda a, new: a.at[_sequence(slots), slots].set(new.astype(a.dtype), mode="drop")
        return self._replace(k=put(self.k, by_head[0]), v=put(self.v, by_head[1]))

    def _clipped(self, slots: Int[Array, "b k w"]) -> Int[Array, "b k w"]:
        return jnp.minimum(slots, self.k.shape[1] - 1)


def empty(
    budgets: Int[np.ndarray, "lengths n"], batch: int, kv_heads: int, head: int, dtype: Any
) -> PairStore:
    """An empty store with room for any prompt length.

    Args:
      budgets: pairs per kv head of each layer, for each prompt length that may occur (`eviction.table`).
      batch: sequences.
      kv_heads: kv heads of a layer.
      head: width of a head.
      dtype: of keys and values.
    """
    # At least one slot, so that padding has something to read where nothing is stored.
    room = max(int(budgets.sum(axis=1).max()) * kv_heads, 1)
    pairs = jnp.zeros((batch, room, head), dtype)
    segments = jnp.zeros((budgets.shape[1], batch, kv_heads), jnp.int32)
    return PairStore(pairs, pairs, jnp.zeros((batch, room), jnp.int32), segments, segments, segments[..., 0])


def _sequence(index: Int[Array, "b k w"]) -> Int[Array, "b 1 1"]:
    return jnp.arange(index.shape[0])[:, None, None]
