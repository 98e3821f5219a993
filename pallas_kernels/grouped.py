"""Shared by the attention operations: queries grouped by the kv head they read, and visible slots."""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

KeyMask = Bool[Array, "b s"] | Bool[Array, "b k s"]


def check_shapes(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    mask: KeyMask | None,
    lengths: Int[Array, "b k"] | None,
) -> None:
    """Refuses arrays whose shapes do not fit together.

    Raises:
      ValueError: query heads that are not a multiple of the kv heads, or a mask or lengths of another shape.
    """
    batch, slots, kv_heads, head = k.shape
    if q.shape[0] != batch or q.shape[3] != head or q.shape[2] % kv_heads:
        raise ValueError(f"queries {q.shape} do not go with keys {k.shape}")
    if mask is not None and mask.shape not in ((batch, slots), (batch, kv_heads, slots)):
        raise ValueError(f"mask {mask.shape} must be {(batch, slots)} or {(batch, kv_heads, slots)}")
    if lengths is not None and lengths.shape != (batch, kv_heads):
        raise ValueError(f"lengths {lengths.shape} must be {(batch, kv_heads)}")


def visible(
    k: Float[Array, "b s k d"], mask: KeyMask | None, lengths: Int[Array, "b k"] | None
) -> Bool[Array, "#b #k s"]:
    """The slots each kv head may read."""
    seen = jnp.ones((1, 1, k.shape[1]), bool)
    if mask is not None:
        seen = mask[:, None] if mask.ndim == 2 else mask
    if lengths is not None:
        seen = seen & (jnp.arange(k.shape[1]) < lengths[..., None])
    return seen


def extent(
    k: Float[Array, "b s k d"], mask: KeyMask | None, lengths: Int[Array, "b k"] | None
) -> tuple[Int[Array, "b k"], Int[Array, "b #k 1 s"] | None]:
    """For kernels: how many slots they must look at, and which of these are visible (None: all)."""
    slots = k.shape[1]
    ends = jnp.full((k.shape[0], k.shape[2]), slots) if lengths is None else jnp.clip(lengths, 0, slots)
    if mask is None:
        return ends.astype(jnp.int32), None
    mask = mask[:, None] if mask.ndim == 2 else mask
    last = jnp.max(jnp.where(mask, jnp.arange(1, slots + 1), 0), axis=2)
    return jnp.minimum(ends, last).astype(jnp.int32), mask[:, :, None].astype(jnp.int32)


def by_kv_head(q: Float[Array, "b q h *d"], kv_heads: int) -> Float[Array, "b k r *d"]:
    """Rows r = (query heads of a kv head) x (query rows)."""
    batch, rows, heads = q.shape[:3]
    grouped = jnp.moveaxis(q.reshape(batch, rows, kv_heads, heads // kv_heads, *q.shape[3:]), 1, 3)
    return grouped.reshape(batch, kv_heads, -1, *q.shape[3:])


def by_query(rows: Float[Array, "b k r *d"], count: int, heads: int) -> Float[Array, "b q h *d"]:
    """The inverse of `by_kv_head` for `count` query rows of so many heads."""
    heads_apart = rows.reshape(rows.shape[0], heads, count, *rows.shape[3:])
    return jnp.moveaxis(heads_apart, 2, 1)


def scores(q: Float[Array, "*b r d"], k: Float[Array, "*b t d"]) -> Float[Array, "*b r t"]:
    """Scaled products, float32."""
    return product(q, k, 1) * q.shape[-1] ** -0.5


def product(x: Float[Array, "*b r c"], y: Float[Array, "*b y z"], axis: int) -> Float[Array, "*b r t"]:
    """Matrix product over the last axis of x and, of the last two of y, number `axis`; float32 result.

    float32 operands at the highest precision, narrower ones at the hardware's default.
    """
    lead = x.ndim - 2
    batch = tuple(range(lead))
    return jax.lax.dot_general(
        x,
        y,
        (((lead + 1,), (lead + axis,)), (batch, batch)),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def check_supported(
    widths: Collection[int], k: Float[Array, "b s k d"], **others: Float[Array, "..."]
) -> None:
    """Refuses what a kernel for these head widths does not support.

    Raises:
      NotImplementedError: another head width, no slots, no rows, other dtypes than float32 and bfloat16, or
        two of them.
    """
    arrays = {**others, "k": k}
    dtypes = {x.dtype for x in arrays.values()}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        found = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise NotImplementedError(f"{found}: all float32 or all bfloat16")
    if k.shape[3] not in widths:
        raise NotImplementedError(f"head width {k.shape[3]} is not in {widths}")
    if not k.shape[1]:
        raise NotImplementedError("no slots")
    if not arrays["q"].shape[1]:
        raise NotImplementedError("no rows")
