"""Attention to the prompt: to the kept pairs, or to all of it where it is recomputed."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.eviction.pair_store import PairStore
from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.mask import Mask
from dllm_jax.state.cache import KV
from dllm_jax.state.rows import Rows, scatter
from dllm_jax.xla.stacks import of_layer

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
    chunk, runs = slots_of_chunk(budget, widest, smallest), of_layer(pairs.runs, layer.index)
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
