"""What `received` and `head_mean` mean, in plain jnp: all weights at once."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped import KeyMask, by_kv_head, check_shapes, scores, visible


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
) -> Float[Array, "b k s"]:
    """Attention that each key receives from the weighted query rows, summed over a kv head's queries.

    As `dllm_jax.nn.attention.received` with a mask of one query row; float32. Rows of weight 0 and invisible
    slots may hold anything, NaN included; the latter receive 0.

    Args:
      q: queries; head i reads kv head i // (h // k).
      k: keys.
      lse: log sum exp of the scaled scores, as `row_attention` gives it; -inf for a row that saw nothing.
      weight: of each query row, float32.
      mask: slots that may be attended to, for all kv heads or for each; None means all.
      lengths: each kv head may read its first `lengths` slots; None means all.

    Raises:
      ValueError: shapes that do not go together.
    """
    check_shapes(q, k, mask, lengths)
    weight = of_rows(weight, q.shape[2] // k.shape[2])
    seen = visible(k, mask, lengths)[..., None, :]
    rows, keys = by_kv_head(q, k.shape[2]), jnp.swapaxes(k, 1, 2)
    sent = weights(scores(rows, keys), column(lse, k.shape[2]), seen & (weight != 0)) * weight
    return jnp.sum(jnp.where(weight != 0, sent, 0.0), axis=2)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
) -> Float[Array, "b q s"]:
    """Attention weights averaged over all query heads, float32.

    As `dllm_jax.nn.attention.head_mean` with a mask of one query row. Invisible slots may hold anything, NaN
    included, and have weight 0; query rows have no influence on one another. Arguments as of `received`.

    Raises:
      ValueError: shapes that do not go together.
    """
    check_shapes(q, k, mask, lengths)
    seen = visible(k, mask, lengths)[..., None, :]
    rows, keys = by_kv_head(q, k.shape[2]), jnp.swapaxes(k, 1, 2)
    all_heads = weights(scores(rows, keys), column(lse, k.shape[2]), seen)
    return jnp.mean(all_heads.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1]), axis=1)


def weights(
    scores: Float[Array, "*b r t"], lse: Float[Array, "*b r 1"], seen: Bool[Array, "..."]
) -> Float[Array, "*b r t"]:
    """Attention weights; 0 where not seen, and in rows that saw nothing."""
    return jnp.where(seen, jnp.exp(scores - jnp.where(lse > -jnp.inf, lse, jnp.inf)), 0.0)


def column(lse: Float[Array, "b h q"], kv_heads: int) -> Float[Array, "b k r 1"]:
    """One number for each row of a kv head, see `by_kv_head`."""
    return lse.reshape(lse.shape[0], kv_heads, -1, 1)


def of_rows(weight: Float[Array, "b q"], groups: int) -> Float[Array, "b 1 r 1"]:
    """The weight of each row of any kv head."""
    return jnp.tile(weight.astype(jnp.float32), (1, groups))[:, None, :, None]
