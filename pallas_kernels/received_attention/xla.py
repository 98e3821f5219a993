"""`received` and `head_mean` by XLA: all slots at once, or a loop over tiles of slots."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped import KeyMask, check_shapes, visible
from pallas_kernels.received_attention import reference

SCORE_BYTES = 2**28  # float32 scores of one tile: 256 MiB


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    tile: int | None = None,
) -> Float[Array, "b k s"]:
    """As the reference, `tile` slots at a time; None takes as many as `SCORE_BYTES` allow."""
    check_shapes(q, k, mask, lengths)
    part = lambda k, seen: reference.received(q, k, lse, weight, seen)
    return _in_tiles(part, q, k, visible(k, mask, lengths), tile)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    tile: int | None = None,
) -> Float[Array, "b q s"]:
    """As the reference, `tile` slots at a time; None takes as many as `SCORE_BYTES` allow."""
    check_shapes(q, k, mask, lengths)
    part = lambda k, seen: reference.head_mean(q, k, lse, seen)
    return _in_tiles(part, q, k, visible(k, mask, lengths), tile)


def _in_tiles(
    part: Callable[[Float[Array, "b t k d"], Bool[Array, "b k t"]], Float[Array, "b r t"]],
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    seen: Bool[Array, "#b #k s"],
    tile: int | None,
) -> Float[Array, "b r s"]:
    """The parts side by side; the last tile begins early and repeats some of what is there."""
    batch, slots, kv_heads = k.shape[:3]
    seen = jnp.broadcast_to(seen, (batch, kv_heads, slots))
    tile = min(tile or max(SCORE_BYTES // max(4 * q.size // q.shape[3], 1), 128), slots)
    if slots <= tile:
        return part(k, seen)

    def put(i, whole):
        begin = jnp.minimum(i * tile, slots - tile)
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, begin, tile, axis)
        return jax.lax.dynamic_update_slice_in_dim(whole, part(cut(k, 1), cut(seen, 2)), begin, axis=2)

    shape = jax.eval_shape(part, k, seen)
    return jax.lax.fori_loop(0, -(-slots // tile), put, jnp.zeros(shape.shape, shape.dtype))
