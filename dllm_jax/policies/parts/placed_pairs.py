"""Kept KV pairs with their positions, which a block-causal model's later blocks rank again."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import key_mask
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.cache import KV, LayerCache
from dllm_jax.state.rows import Rows


class PlacedPairs(NamedTuple):
    """Storage of a layer: the kept pairs, and after them the block's own.

    Attributes:
      pairs: Keys and values.
      position: Canvas position of each kept pair.
    """

    pairs: KV
    position: Int[Array, "*n b s k"]

    @staticmethod
    def zeros(spec: ModelSpec, batch: int, slots: int, dtype: Any) -> "PlacedPairs":
        """Empty slots for every layer."""
        pairs = KV.zeros(spec, batch, slots, dtype, scattered=False)
        return PlacedPairs(pairs, jnp.zeros(pairs.k.shape[:-1], jnp.int32))

    @staticmethod
    def of_rows(new: KV, rows: Rows) -> "PlacedPairs":
        """The pairs of the computed rows."""
        return PlacedPairs(new, jnp.broadcast_to(rows.index[..., None], new.k.shape[:-1]))

    def first(self, slots: int, then: "PlacedPairs") -> "PlacedPairs":
        """The pairs of the first slots, and others after them."""
        return jax.tree.map(lambda own, new: jnp.concatenate([own[:, :slots], new], axis=1), self, then)

    def best(
        self, layer: Layer, score: Float[Array, "b k s"], count: Int[Array, "b"], slots: int, length: int
    ) -> "PlacedPairs":
        """The best-scored pairs in order of position; empty slots have the position `length`.

        Args:
          layer: this layer's weights.
          score: Scores of the pairs, per KV head.
          count: Number of pairs to keep.
          slots: Slots of the result.
          length: Length of the canvas.
        """
        index = layer.topk_evict(score, jnp.broadcast_to(count[:, None], score.shape[:2]), slots)
        padded = jnp.pad(self.position, ((0, 0), (0, 1), (0, 0)), constant_values=length)
        position = jnp.take_along_axis(padded, jnp.swapaxes(index, 1, 2), axis=1)
        return PlacedPairs(KV(*layer.sparse_gather(*self.pairs, index)), position)


def attend_to_kept(
    layer: Layer,
    q: Float[Array, "b q h d"],
    new: KV,
    cache: LayerCache,
    rows: Rows,
    kept: Bool[Array, "b s"],
) -> tuple[Float[Array, "b q h d"], LayerCache]:
    """Attention within a block: the kept pairs lie in front of its own, which take the last slots."""
    cache, both = cache.write_last(new, part="pairs")
    pairs, real = both.pairs, rows.real
    filled = jnp.pad(kept, ((0, 0), (0, pairs.k.shape[1] - kept.shape[1] - real.shape[1])))
    o, _ = layer.attention(q, pairs.k, pairs.v, key_mask(jnp.concatenate([filled, real], axis=1)))
    return o, cache
