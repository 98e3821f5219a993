"""Attention to the prompt: to the kept pairs, or to all of it where it is recomputed.

Kept pairs are read in chunks of slots per head. Heads keep different numbers of pairs; unpacked to one static
width, all heads would be as wide as the widest one may be, which is the full prompt if one head can win a
layer's budget. With chunks, the head that is actually the widest decides at run time. Where a single chunk
holds what any head may keep, it is read beside the dense pairs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.eviction.pair_store import PairStore
from dllm_jax.nn.layer import Layer, LayerIndex
from dllm_jax.nn.mask import Mask
from dllm_jax.state.cache import KV
from dllm_jax.state.rows import Rows, scatter

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
    chunk, index = slots_of_chunk(budget, widest, smallest), layer.index
    if chunk == widest:
        k, v, kept = pairs.read(index, chunk, readable=readable)
        shape = jnp.broadcast_shapes(kept.shape[:3], visible.shape[:3])
        mask = jnp.concatenate([jnp.broadcast_to(m, (*shape, m.shape[3])) for m in (kept, visible)], axis=3)
        k, v = (jnp.concatenate(parts, axis=1) for parts in ((k, dense.k), (v, dense.v)))
        return layer.attention(q, k, v, mask)[0]

    # The loop ends with the longest run of any head and sequence, known at run time only.
    longest = jnp.max(pairs.length[index])

    def add(state):
        # A head whose run has ended attends to nothing: its log-sum-exp is -inf, its weight in the merge 0.
        done, o, lse = state
        k, v, real = pairs.read(index, chunk, done, readable)
        part, part_lse = layer.attention(q, k, v, real)
        return done + chunk, *merge_by_lse((o, lse), (part.astype(jnp.float32), part_lse))

    # Sums over chunks are float32 at any dtype, so the number of chunks does not change the precision.
    o, lse = layer.attention(q, dense.k, dense.v, visible)
    start = jnp.int32(0), o.astype(jnp.float32), lse
    return jax.lax.while_loop(lambda state: state[0] < longest, add, start)[1].astype(q.dtype)


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


def merge_by_lse(
    one: tuple[Float[Array, "b q h d"], Float[Array, "b h q"]],
    other: tuple[Float[Array, "b q h d"], Float[Array, "b h q"]],
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Output and log-sum-exp of attention to the union of two disjoint sets of pairs.

    o = (e^lse1 o1 + e^lse2 o2) / (e^lse1 + e^lse2), as FlashAttention merges its tiles of keys; 0 and -inf
    where both sets are empty.
    """
    lse = jnp.logaddexp(one[1], other[1])

    # exp(-inf - -inf) would be NaN where neither set holds a pair.
    safe = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weight = lambda part: jnp.swapaxes(jnp.exp(part - safe), 1, 2)[..., None]
    return one[0] * weight(one[1]) + other[0] * weight(other[1]), lse
