"""Shared parts of the attention kernels of all platforms: operands, products, and the online softmax.

Kernels see the queries grouped by the KV head that they read, [b k n d]: n counts the query heads of a kv
head times the query positions, so that the keys and values of a KV head are loaded once for all of them.
"""

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.xla import Mask, check_shapes

LOWEST = -1e30  # below any score, and still finite when subtracted


def check_supported(
    widths: Collection[int],
    k: Float[Array, "b s k d"],
    mask: Mask | None,
    lengths: Int[Array, "b k"] | None,
    masked_queries: int = 1,
    **others: Float[Array, "..."],
) -> None:
    """Refuses what a kernel for these head widths does not support.

    Raises:
      NotImplementedError: other dtypes than float32 and bfloat16, or two of them; another head width, no
        slots, no queries, or a mask that differs between more than `masked_queries` query positions.
      ValueError: shapes that do not go together.
    """
    check_shapes(others["q"], k, mask, lengths)
    arrays = {**others, "k": k}
    dtypes = {x.dtype for x in arrays.values()}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        described = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise NotImplementedError(f"{described}: all float32 or all bfloat16")
    if k.shape[3] not in widths:
        raise NotImplementedError(f"head width {k.shape[3]} is not in {widths}")
    if not k.shape[1]:
        raise NotImplementedError("no slots")
    if not arrays["q"].shape[1]:
        raise NotImplementedError("no queries")
    if mask is not None and mask.shape[2] > masked_queries:
        raise NotImplementedError("the mask differs between query positions")


def extent(
    k: Float[Array, "b s k d"], mask: Mask | None, lengths: Int[Array, "b k"] | None
) -> tuple[Int[Array, "b k"], Bool[Array, "b #k #q s"] | None]:
    """The slots that kernels must look at.

    Returns:
      how many of each KV head, up to its last visible one; and which of these are visible, None if all are.
    """
    batch, slots, kv_heads = k.shape[:3]
    ends = jnp.full((batch, kv_heads), slots) if lengths is None else jnp.clip(lengths, 0, slots)
    if mask is None:
        return ends.astype(jnp.int32), None
    mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))

    # Tiles beyond the last visible slot are never loaded, whether lengths or a mask hide them.
    last = jnp.max(jnp.where(jnp.any(mask, axis=2), jnp.arange(1, slots + 1), 0), axis=2)
    return jnp.minimum(ends, last).astype(jnp.int32), mask


def by_kv_head(q: Float[Array, "b q h d"], kv_heads: int) -> Float[Array, "b k n d"]:
    """Queries grouped by the KV head that they read."""
    batch, queries, heads, head = q.shape

    # Query head i reads kv head i // (h / k): the heads of a group are neighbors.
    grouped = jnp.moveaxis(q.reshape(batch, queries, kv_heads, heads // kv_heads, head), 1, 3)
    return grouped.reshape(batch, kv_heads, -1, head)


def by_position(
    out: Float[Array, "b k n d"], lse: Float[Array, "b k n 1"], q: Float[Array, "b q h d"]
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """The inverse of `by_kv_head` for attention and its log-sum-exp, in the shape and dtype of q."""
    batch, queries, heads, head = q.shape
    out = jnp.moveaxis(out.reshape(batch, heads, queries, head), 2, 1)
    return out.astype(q.dtype), lse.reshape(batch, heads, queries)


def lse_column(lse: Float[Array, "b h q"], kv_heads: int) -> Float[Array, "b k n 1"]:
    """The log-sum-exp of each query, grouped as `by_kv_head` does."""
    return lse.reshape(lse.shape[0], kv_heads, -1, 1)


def weight_column(weight: Float[Array, "b q"], groups: int) -> Float[Array, "b 1 n 1"]:
    """The weight of each query for any KV head, grouped as `by_kv_head` does for `groups` query heads."""
    return jnp.tile(weight.astype(jnp.float32), (1, groups))[:, None, :, None]


def scores(q: Float[Array, "n d"], k: Float[Array, "t d"]) -> Float[Array, "n t"]:
    """Scaled products of a tile of queries and a tile of keys, float32."""
    return _product(q, k, 1) * q.shape[-1] ** -0.5


def weights(
    scores: Float[Array, "n t"], lse: Float[Array, "n 1"], visible: Bool[Array, "#n t"]
) -> Float[Array, "n t"]:
    """Attention weights exp(score - lse); 0 where not visible, and for queries that saw nothing."""
    # exp(score - inf) is 0, where score - (-inf) would be infinite.
    return jnp.where(visible, jnp.exp(scores - jnp.where(lse > -jnp.inf, lse, jnp.inf)), 0.0)


class OnlineSoftmax(NamedTuple):
    """Softmax attention summed up over tiles of slots, one column per query (Milakov & Gimelshein, 2018).

    The sums are relative to the largest score so far. When a tile brings a larger one, what was summed is
    rescaled by exp(old - new).

    Attributes:
      top: largest score seen.
      total: sum of e = exp(score - top).
      out: sum of e times value.
    """

    top: Float[Array, "*b n 1"]
    total: Float[Array, "*b n 1"]
    out: Float[Array, "*b n d"]

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> "OnlineSoftmax":
        """The sums before the first tile, for queries of this shape [*b n d]."""
        column = (*shape[:-1], 1)
        zeros = lambda size: jnp.zeros(size, jnp.float32)
        return cls(jnp.full(column, LOWEST, jnp.float32), zeros(column), zeros(shape))

    def add(
        self, scores: Float[Array, "n t"], visible: Bool[Array, "#n t"], v: Float[Array, "t d"]
    ) -> "OnlineSoftmax":
        """The sums with one more tile of slots.

        Args:
          scores: anything where not visible.
          visible: slots that may be attended to.
          v: their values, finite where not visible.
        """
        # LOWEST instead of -inf: as long as nothing was visible, -inf - (-inf) would be NaN.
        top = jnp.maximum(self.top, jnp.max(jnp.where(visible, scores, LOWEST), axis=-1, keepdims=True))
        rescale = jnp.exp(self.top - top)
        weight = jnp.where(visible, jnp.exp(scores - top), 0.0)
        return OnlineSoftmax(
            top=top,
            total=self.total * rescale + jnp.sum(weight, axis=-1, keepdims=True),
            out=self.out * rescale + _product(weight.astype(v.dtype), v, 0),
        )

    def plus(self, other: "OnlineSoftmax") -> "OnlineSoftmax":
        """The sums over two ranges of slots."""
        top = jnp.maximum(self.top, other.top)
        ours, theirs = jnp.exp(self.top - top), jnp.exp(other.top - top)
        return OnlineSoftmax(
            top, self.total * ours + other.total * theirs, self.out * ours + other.out * theirs
        )

    def result(self) -> tuple[Float[Array, "*b n d"], Float[Array, "*b n 1"]]:
        """Attention and log-sum-exp after the last tile; 0 and -inf for queries that saw nothing."""
        seen = self.total > 0
        safe = jnp.where(seen, self.total, 1.0)
        return self.out / safe, jnp.where(seen, self.top + jnp.log(safe), -jnp.inf)


def _product(x: Float[Array, "n c"], y: Float[Array, "y z"], axis: int) -> Float[Array, "n t"]:
    """Matrix product over the last axis of x and `axis` of y; float32 result.

    float32 operands at full precision, narrower ones at the hardware's default.
    """
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
