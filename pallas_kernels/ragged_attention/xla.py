"""`ragged_attention` by XLA: runs are read in chunks of slots per head.

Heads keep different numbers of pairs. Unpacked to one static width, all heads would be as wide as the widest
one may be, which is the whole prompt if one head can win a layer's budget. With chunks, the head that is the
widest decides at run time. Where a single chunk holds any run, it is read together with the dense pairs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.xla import attention_by_sequence
from pallas_kernels.attention.xla import check_shapes as check_attention


def ragged_attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    kept_k: Float[Array, "b s d"],
    kept_v: Float[Array, "b s d"],
    start: Int[Array, "b k"],
    length: Int[Array, "b k"],
    mask: Bool[Array, "#b #k #q t"] | None = None,
    readable: Bool[Array, "b s"] | None = None,
    *,
    chunk: int,
    widest: int,
) -> Float[Array, "b q h d"]:
    """Attends to the union of the dense pairs and each head's run; see `pallas_kernels.ragged_attention`."""
    visible = jnp.ones((1, 1, 1, k.shape[1]), bool) if mask is None else mask

    def read(first: int | Int[Array, ""]) -> tuple[Array, Array, Bool[Array, "b k 1 w"]]:
        (run_k, run_v), real = read_runs((kept_k, kept_v), start, length, chunk, first, readable)
        return jnp.swapaxes(run_k, 1, 2), jnp.swapaxes(run_v, 1, 2), real[:, :, None]

    if chunk == widest:
        run_k, run_v, real = read(0)
        shape = jnp.broadcast_shapes(real.shape[:3], visible.shape[:3])
        both = jnp.concatenate([jnp.broadcast_to(m, (*shape, m.shape[3])) for m in (real, visible)], axis=3)
        keys, values = (jnp.concatenate(parts, axis=1) for parts in ((run_k, k), (run_v, v)))
        return attention_by_sequence(q, keys, values, both)[0]

    # The loop ends with the longest run of any head and sequence, known at run time only.
    longest = jnp.max(length)

    def add(state):
        # A head whose run has ended attends to nothing: its log-sum-exp is -inf, its weight in the merge 0.
        done, o, lse = state
        part, part_lse = attention_by_sequence(q, *read(done))
        return done + chunk, *merge_by_lse((o, lse), (part.astype(jnp.float32), part_lse))

    # Sums over chunks are float32 at any dtype, so the number of chunks does not change the precision.
    o, lse = attention_by_sequence(q, k, v, visible)
    begin = jnp.int32(0), o.astype(jnp.float32), lse
    return jax.lax.while_loop(lambda state: state[0] < longest, add, begin)[1].astype(q.dtype)


def read_runs(
    arrays: tuple[Array, ...],
    start: Int[Array, "b k"],
    length: Int[Array, "b k"],
    width: int,
    first: int | Int[Array, ""] = 0,
    readable: Bool[Array, "b s"] | None = None,
) -> tuple[tuple[Array, ...], Bool[Array, "b k w"]]:
    """Reads `width` slots of each head's run, and says which of them are real and readable.

    Args:
      arrays: Arrays of slots [b s *d].
      start: First slot of each run.
      length: Number of slots of each run.
      width: Number of slots to read; padding reads any slot.
      first: Place in each run at which to begin.
      readable: Slots that may be read; None for all.
    """
    order = first + jnp.arange(width)
    real, slots = order < length[..., None], start[..., None] + order
    sequence, at = jnp.arange(len(start))[:, None, None], jnp.where(real, slots, arrays[0].shape[1] - 1)
    real = real if readable is None else real & readable[sequence, at]
    return tuple(array[sequence, at] for array in arrays), real


def merge_by_lse(
    first: tuple[Float[Array, "b q h d"], Float[Array, "b h q"]],
    other: tuple[Float[Array, "b q h d"], Float[Array, "b h q"]],
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Output and log-sum-exp of attention to the union of two disjoint sets of pairs.

    o = (e^lse1 o1 + e^lse2 o2) / (e^lse1 + e^lse2), as FlashAttention merges its tiles of keys; 0 and -inf
    where both sets are empty.
    """
    lse = jnp.logaddexp(first[1], other[1])

    # exp(-inf - -inf) would be NaN where neither set holds a pair.
    safe = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weight = lambda part: jnp.swapaxes(jnp.exp(part - safe), 1, 2)[..., None]
    return first[0] * weight(first[1]) + other[0] * weight(other[1]), lse


def check_shapes(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    kept_k: Float[Array, "b s d"],
    kept_v: Float[Array, "b s d"],
    start: Int[Array, "b k"],
    length: Int[Array, "b k"],
    mask: Bool[Array, "#b #k #q t"] | None = None,
    readable: Bool[Array, "b s"] | None = None,
    *,
    chunk: int,
    widest: int,
) -> None:
    """Refuses arrays whose shapes do not fit together.

    Raises:
      ValueError: Queries, a mask, runs or slots of another shape, or a chunk beyond the widest run.
    """
    check_attention(q, k, mask, None)
    batch, _, kv_heads, head = k.shape
    if kept_k.shape != kept_v.shape or kept_k.shape[::2] != (batch, head):
        raise ValueError(f"kept pairs {kept_k.shape} and {kept_v.shape} do not go with keys {k.shape}")
    if not start.shape == length.shape == (batch, kv_heads):
        raise ValueError(f"runs {start.shape} and {length.shape} must be {(batch, kv_heads)}")
    if readable is not None and readable.shape != kept_k.shape[:2]:
        raise ValueError(f"readable {readable.shape} must be {kept_k.shape[:2]}")
    if not 0 < chunk <= max(widest, 1):
        raise ValueError(f"chunk={chunk} must be from 1 to widest={widest}")
