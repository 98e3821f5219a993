"""Storage of the KV pairs that heads keep, and attention to them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.mask import Mask
from dllm_jax.state.cache import KV
from dllm_jax.state.rows import Rows, marked, scatter
from dllm_jax.xla.reductions import count_marked
from dllm_jax.xla.stacks import of_layer, put_in_window, put_of_layer
from pallas_kernels.ragged_attention import read_runs

# -- storage: one flat array of slots for all layers -----------------------------------------------


class PairStore(NamedTuple):
    """Pairs of all layers and KV heads stored back to back, each head's in order of position.

    Attributes:
      k: rotated keys.
      v: values.
      position: prompt position of each pair.
      runs: First slot of each layer and head, and number of slots.
      budget: slots of each layer, per KV head.
    """

    k: Float[Array, "b s d"]
    v: Float[Array, "b s d"]
    position: Int[Array, "b s"]
    runs: Int[Array, "n b k 2"]
    budget: Int[Array, "n b"]

    @property
    def start(self) -> Int[Array, "n b k"]:
        """First slot of each layer and head."""
        return self.runs[..., 0]

    @property
    def length(self) -> Int[Array, "n b k"]:
        """Number of slots of each layer and head."""
        return self.runs[..., 1]

    def read(
        self, layer: LayerIndex, width: int, readable: Bool[Array, "b l"] | None = None
    ) -> tuple[Array, Array, Bool[Array, "b k 1 w"]]:
        """Keys and values [b w k d] of one layer, padded to `width`, and which are real.

        Padding holds any pair of the store: the mask must hide it, as it hides pairs of positions that are
        not `readable`.
        """
        shown = None if readable is None else self.readable(readable)
        runs = of_layer(self.runs, layer)
        (k, v), real = read_runs((self.k, self.v), runs[..., 0], runs[..., 1], width, readable=shown)

        # Gathered per head [b k w d], then laid out as a layer's keys and values are.
        return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), real[:, :, None]

    def readable(self, positions: Bool[Array, "b l"]) -> Bool[Array, "b s"]:
        """Marks the slots whose pairs are of these positions."""
        return jnp.take_along_axis(positions, self.position, axis=1)

    def positions(self, length: int) -> Bool[Array, "b {length}"]:
        """Marks the positions of a canvas of which some layer and head holds a pair."""
        sequence = jnp.arange(len(self.k))[:, None]
        ends = jnp.zeros((len(self.k), self.k.shape[1] + 1), jnp.int32)
        ends = ends.at[sequence, self.start].add(1).at[sequence, self.start + self.length].add(-1)
        occupied = jnp.cumsum(ends, axis=1)[:, :-1] > 0
        return marked(jnp.where(occupied, self.position, length), length)

    def allot(
        self,
        layer: Layer,
        first: Int[Array, "b"],
        position: Int[Array, "b k w"],
        prompt: int,
        where: Bool[Array, "b 1"],
        room: int,
    ) -> tuple["PairStore", "Window"]:
        """Assigns slots to the positions that one layer's heads keep.

        Args:
          layer: the layer.
          first: the layer's first slot in each sequence.
          position: kept prompt positions of each head, ascending, padded with `prompt`.
          prompt: prompt positions.
          where: sequences to assign in; the others keep what they have.
          room: Upper bound of the pairs of a layer.

        Returns:
          the changed store, and the layer's slots in it.
        """
        # The heads' runs lie back to back, each as long as its number of kept positions.
        retained, head = position < prompt, np.arange(position.shape[1])
        length = count_marked(retained)
        before = jnp.where(head[:, None] > head, length[:, None], 0)
        start = first[:, None] + jnp.sum(before, axis=2)
        new, old = jnp.stack([start, length], axis=2), of_layer(self.runs, layer.entry)
        runs = jnp.where(where[..., None], new.astype(jnp.int32), old)
        runs = layer.kernels.of_all_heads(runs)

        # A kept position's slot is its place in its head's run.
        window = Window.of(runs, min(room, self.k.shape[1]), self.k.shape[1])
        sequence = _sequence(window.slot)
        place = window.slot - runs[sequence, window.head, 0]
        new = position[sequence, window.head, jnp.clip(place, 0, position.shape[2] - 1)]
        store = self._replace(
            runs=put_of_layer(self.runs, runs, layer.entry),
            position=put_in_window(self.position, new, window.first, window.real & where),
        )
        return store, window

    def renew(
        self,
        window: "Window",
        k: Float[Array, "b p k d"],
        v: Float[Array, "b p k d"],
        where: Bool[Array, "b 1"],
    ) -> "PairStore":
        """Overwrites the kept pairs of one layer with newly computed ones of the same prompt positions.

        Args:
          window: the layer's slots (`allot`).
          k: new rotated keys of the prompt.
          v: new values of the prompt.
          where: sequences to overwrite in.
        """
        # Slot by slot: over a mesh the kept pairs alone are exchanged. Lists of heads would be exchanged
        # with their padding, as wide as the prompt where a single head may keep all of it.
        sequence = _sequence(window.slot)
        position = self.position[sequence, window.slot]
        of_slots = lambda new: new[sequence, position, window.head]
        put = lambda a, new: put_in_window(a, of_slots(new), window.first, window.real & where)
        return self._replace(k=put(self.k, k), v=put(self.v, v))


class Window(NamedTuple):
    """The slots that hold a layer's runs, and others before or after them.

    Attributes:
      first: First slot of each sequence.
      slot: Slots, one after another.
      head: KV head of each slot.
      real: Slots that belong to a run.
    """

    first: Int[Array, "b"]
    slot: Int[Array, "b w"]
    head: Int[Array, "b w"]
    real: Bool[Array, "b w"]

    @classmethod
    def of(cls, runs: Int[Array, "b k 2"], width: int, size: int) -> "Window":
        """The window of a layer's runs that ends in a store of `size` slots."""
        start, end = runs[..., 0], runs[:, -1:, 0] + runs[:, -1:, 1]
        first = jnp.minimum(start[:, 0], size - width)
        slot = first[:, None] + jnp.arange(width)
        head = jnp.sum(slot[..., None] >= start[:, None, 1:], axis=2)
        return cls(first, slot, head, (slot >= start[:, :1]) & (slot < end))


def empty(
    budgets: Int[np.ndarray, "lengths n"], batch: int, kv_heads: int, head: int, dtype: Any
) -> PairStore:
    """An empty store with room for any prompt length.

    Args:
      budgets: pairs per KV head of each layer, for each prompt length that may occur (`eviction.table`).
      batch: sequences.
      kv_heads: KV heads of a layer.
      head: width of a head.
      dtype: Dtype of keys and values.
    """
    # At least one slot, so that padding has something to read where nothing is stored.
    room = max(int(budgets.sum(axis=1).max()) * kv_heads, 1)
    pairs = jnp.zeros((batch, room, head), dtype)
    runs = jnp.zeros((budgets.shape[1], batch, kv_heads, 2), jnp.int32)
    return PairStore(pairs, pairs, jnp.zeros((batch, room), jnp.int32), runs, runs[..., 0, 0])


def _sequence(index: Int[Array, "b w"]) -> Int[np.ndarray, "b 1"]:
    return np.arange(len(index))[:, None]


# -- attention to the kept pairs -------------------------------------------------------------------


SMALLEST_CHUNK = 128  # slots: fewer would not fill the hardware


def attend_to_kept(
    layer: Layer,
    q: Float[Array, "b q h d"],
    pairs: PairStore,
    dense: KV,
    visible: Mask,
    budget: int,
    widest: int,
    readable: Bool[Array, "b l"] | None = None,
    smallest: int = SMALLEST_CHUNK,
) -> Float[Array, "b q h d"]:
    """Attention of the queries to a layer's kept pairs, and to the dense ones that are visible.

    Args:
      layer: this layer's weights, which compute the attention.
      q: rotated queries.
      pairs: the kept pairs of all layers.
      dense: other keys and values, of all heads [b t k d].
      visible: dense pairs that may be attended to [b #k #q t].
      budget: pairs of a head on average, and the size of a chunk.
      widest: upper bound of the pairs of a head.
      readable: positions whose pairs may be attended to; None for all.
      smallest: lower bound of the slots of a chunk, unless `widest` is below it.

    Returns:
      the attention output, in the dtype of q.
    """
    chunk, runs = slots_of_chunk(budget, widest, smallest), of_layer(pairs.runs, layer.entry)
    shown = None if readable is None else pairs.readable(readable)
    start, length = runs[..., 0], runs[..., 1]
    return layer.ragged_attention(
        q, *dense, pairs.k, pairs.v, start, length, visible, shown, chunk=chunk, widest=max(widest, 1)
    )


def slots_of_chunk(budget: int, widest: int, smallest: int = SMALLEST_CHUNK) -> int:
    """Slots of each head in a chunk; 1 where there is no prompt, so that `widest` is 0."""
    return max(min(max(budget, smallest), widest), 1)


def prompt_pairs(
    pairs: PairStore,
    layer: LayerIndex,
    due: Bool[Array, "b 1"],
    keys: tuple[Rows, Float[Array, "b w k d"]],
    values: tuple[Rows, Float[Array, "b q k d"]],
    prompt: Bool[Array, "b l"],
    columns: int,
    readable: Bool[Array, "b l"] | None = None,
) -> tuple[Float[Array, "b c k d"], Float[Array, "b c k d"], Bool[Array, "b #k 1 c"]]:
    """Keys and values of the prompt, and which are real: all new where it is due, else the kept pairs.

    Args:
      pairs: the kept pairs of all layers.
      layer: index of the layer.
      due: sequences whose prompt is recomputed; the rows then hold all of it.
      keys: new rotated keys, and their positions.
      values: new values, and their positions.
      prompt: prompt positions that may be attended to where it is due.
      columns: prompt positions that may be kept, the first ones: all of them, unless some are stored densely.
      readable: positions whose kept pairs may be attended to; None for all.
    """
    # Kept pairs are packed to the left of the columns, in order of position; padding follows.
    old_k, old_v, real = pairs.read(layer, columns, readable=readable)

    # A new pair stands at its prompt position; rows of the response lie beyond the columns and are dropped.
    # Those of a full step stand there already.
    def renewed(old, rows, new):
        in_order = new[:, :columns] if rows.full else scatter(jnp.zeros_like(old), rows.index, new)
        return jnp.where(due[..., None, None], in_order.astype(old.dtype), old)

    real = jnp.where(due[..., None, None], prompt[:, None, None, :columns], real)
    return renewed(old_k, *keys), renewed(old_v, *values), real
