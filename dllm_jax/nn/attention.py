"""Attention that returns its log-sum-exp, and statistics of its weights recomputed from that.

One function serves every mask: full bidirectional, padding, block-causal and per-head lengths are all a
boolean array that broadcasts to [b k q s]. Weights are not returned; a caller that needs them recomputes its
part from `lse` (`received`, `head_mean`). Where the scores of all query rows would take more than
`query_chunks.SCORE_BYTES`, they are computed a chunk of rows at a time.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.nn.query_chunks import joined, over_chunks, rows_at_once
from dllm_jax.nn.spec import ModelSpec

Mask = Bool[Array, "#b #k #q s"]


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Softmax attention with grouped query heads; scale 1/sqrt(d), scores and softmax in float32.

    Args:
      q: queries; head i reads kv head i // (h // k).
      k: keys, rotated.
      v: values.
      mask: True where a query may attend; None means everywhere. A slot that no query may attend to can
        hold anything, NaN included.
      chunk: query rows at a time; None means as many as `SCORE_BYTES` allows.

    Returns:
      out in q's dtype, and lse = log sum exp of the scaled scores, float32. A query that may attend to
      nothing gives 0 and -inf.
    """
    if mask is not None:  # 0 * NaN is NaN
        v = jnp.where(jnp.swapaxes(jnp.any(mask, axis=2), 1, 2)[..., None], v, 0)

    def attend(mask, q):
        probabilities, lse = _softmax(_scores(q, k, mask))
        out = einsum("bkgqs,bskd->bqkgd", probabilities.astype(v.dtype), v).reshape(q.shape)
        return out, lse.reshape(q.shape[0], q.shape[2], q.shape[1])

    rows, chunk = q.shape[1], chunk or _chunk(q, k)
    if rows <= chunk:
        return attend(mask, q)
    out, lse = over_chunks(attend, chunk, mask, q)
    return joined(out, 1, rows), joined(lse, 2, rows)


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None = None,
    chunk: int | None = None,
) -> Float[Array, "b k s"]:
    """Attention that each key receives from the weighted query rows, summed over a kv head's queries.

    Rows of weight 0 may hold anything, NaN included.
    """

    def send(mask, q, lse, weight):
        weights = _probabilities(q, k, jnp.swapaxes(lse, 1, 2), mask)
        weights = jnp.where(weight[:, None, None, :, None] != 0, weights, 0.0)
        return einsum("bkgqs,bq->bks", weights, weight)

    rows = q, jnp.swapaxes(lse, 1, 2), weight
    chunk = chunk or _chunk(q, k)
    if q.shape[1] <= chunk:
        return send(mask, *rows)
    return jnp.sum(over_chunks(send, chunk, mask, *rows), axis=0)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None = None,
    chunk: int | None = None,
) -> Float[Array, "b q s"]:
    """Attention weights averaged over all query heads (attention rollout)."""

    def mean(mask, q, lse):
        return jnp.mean(_probabilities(q, k, jnp.swapaxes(lse, 1, 2), mask), axis=(1, 2))

    rows = q, jnp.swapaxes(lse, 1, 2)
    chunk = chunk or _chunk(q, k)
    if q.shape[1] <= chunk:
        return mean(mask, *rows)
    return joined(over_chunks(mean, chunk, mask, *rows), 1, q.shape[1])


def weights(
    q: Float[Array, "b q h d"], k: Float[Array, "b s k d"], mask: Mask | None = None
) -> Float[Array, "b h q s"]:
    """Attention weights of a few query rows, float32; 0 for a query that may attend to nothing."""
    b, rows, heads = q.shape[:3]
    return _softmax(_scores(q, k, mask))[0].reshape(b, heads, rows, k.shape[1])


def key_mask(valid: Bool[Array, "b s"]) -> Mask:
    """Every query may attend to every valid key."""
    return valid[:, None, None, :]


def padding_mask(valid: Bool[Array, "b s"], queries: Bool[Array, "b q"], spec: ModelSpec) -> Mask:
    """Queries attend to valid keys; those at padding do so too or attend to nothing, depending on the model.

    Args:
      valid: keys that are not padding.
      queries: queries that are not padding.
      spec: `pad_rows_attend` decides about queries at padding.
    """
    mask = key_mask(valid)
    return mask if spec.pad_rows_attend else mask & queries[:, None, :, None]


def length_mask(lengths: Int[Array, "b k"], slots: int) -> Mask:
    """Each kv head may read its first `lengths` of `slots` cached pairs."""
    return jnp.arange(slots) < lengths[:, :, None, None]


def _chunk(q, k) -> int:
    return rows_at_once(q.shape[0], q.shape[2], k.shape[1])


def _scores(q, k, mask) -> Float[Array, "b k g q s"]:
    b, rows, heads, head = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(b, rows, kv_heads, heads // kv_heads, head)
    scores = einsum("bqkgd,bskd->bkgqs", grouped, k, out=jnp.float32) * head**-0.5
    return scores if mask is None else jnp.where(mask[:, :, None], scores, -jnp.inf)


def _softmax(
    scores: Float[Array, "b k g q s"],
) -> tuple[Float[Array, "b k g q s"], Float[Array, "b k g q 1"]]:
    """Probabilities and log-sum-exp of the scores; 0 and -inf where all of them are -inf."""
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    return weights / safe, jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)


def _probabilities(q, k, lse, mask) -> Float[Array, "b k g q s"]:
    scores = _scores(q, k, mask)
    lse = lse.reshape(*scores.shape[:4], 1)
    return jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, jnp.inf))
