"""What `row_attention` means, in plain jnp: all scores at once."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped import KeyMask, by_kv_head, by_query, check_shapes, product, scores, visible


class RowAttention(NamedTuple):
    """Attention and what it takes to recompute its weights.

    Attributes:
      out: in q's dtype.
      lse: log sum exp of the scaled scores, float32.
    """

    out: Float[Array, "b q h d"]
    lse: Float[Array, "b h q"]


def row_attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
) -> RowAttention:
    """Softmax attention of a few query rows over many slots; scale 1/sqrt(d), scores and softmax in float32.

    As `dllm_jax.nn.attention` with a mask of one query row. A query that may attend to nothing gives 0
    and -inf. Slots that nobody may attend to can hold anything, NaN included, and rows of q have no influence
    on one another.

    Args:
      q: queries; head i reads kv head i // (h // k).
      k: keys.
      v: values.
      mask: slots that may be attended to, for all kv heads or for each; None means all.
      lengths: each kv head may read its first `lengths` slots; None means all. With a mask, both must allow.

    Raises:
      ValueError: shapes that do not go together.
    """
    check_shapes(q, k, mask, lengths)
    heads_first = lambda x: jnp.swapaxes(x, 1, 2)
    seen = visible(k, mask, lengths)[..., None, :]
    rows = by_kv_head(q, k.shape[2])
    logits = jnp.where(seen, scores(rows, heads_first(k)), -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    values = jnp.where(jnp.swapaxes(seen, 2, 3), heads_first(v), 0)  # 0 * NaN is NaN
    out = product((weights / safe).astype(v.dtype), values, 0)
    return shaped(q, out, jnp.where(total > 0, top + jnp.log(safe), -jnp.inf))


def shaped(
    q: Float[Array, "b q h d"], out: Float[Array, "b k r d"], lse: Float[Array, "b k r 1"]
) -> RowAttention:
    """Rows of all kv heads as the result."""
    batch, rows, heads = q.shape[:3]
    return RowAttention(by_query(out, rows, heads).astype(q.dtype), lse.reshape(batch, heads, rows))
