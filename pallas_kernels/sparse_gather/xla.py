"""`sparse_gather` by XLA: its own gather, which defines the meaning."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sparse_gather(
    k: Float[Array, "b s k d"], v: Float[Array, "b s k d"], index: Int[Array, "b #k w"]
) -> tuple[Float[Array, "b w k d"], Float[Array, "b w k d"]]:
    """The pairs that each KV head keeps, after one another: bit-equal copies, a NaN being any NaN.

    Args:
      k: keys.
      v: values, in the same dtype.
      index: slot of each copy, in any order, by KV head or one list for all of them; s where there is none,
        which writes zeros. Lists of different length are filled up with s to a common width.

    Raises:
      ValueError: shapes that do not go together.
    """
    check_shapes(k, v, index)
    slots = k.shape[1]
    place = jnp.swapaxes(index, 1, 2)[..., None]

    # Index s reads some slot and is then not chosen: a product with 0 would let its NaN through.
    slot = jnp.minimum(place, slots - 1)
    take = lambda x: jnp.where(place < slots, jnp.take_along_axis(x, slot, axis=1), jnp.zeros((), x.dtype))
    return take(k), take(v)


def check_shapes(k: Float[Array, "b s k d"], v: Float[Array, "b s k d"], index: Int[Array, "b #k w"]) -> None:
    """Refuses arrays whose shapes do not fit together.

    Raises:
      ValueError: keys and values of different shape, indices of another batch or other heads, or no slots.
    """
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"keys {k.dtype}{k.shape} and values {v.dtype}{v.shape} must be alike")
    if index.shape[0] != k.shape[0] or index.shape[1] not in (1, k.shape[2]):
        raise ValueError(
            f"index {index.shape} must begin with {(k.shape[0], k.shape[2])} or {(k.shape[0], 1)}"
        )
    if not k.shape[1]:
        raise ValueError("no slots")
