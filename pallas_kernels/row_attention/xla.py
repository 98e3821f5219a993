"""`row_attention` by XLA: all slots at once, or a scan over tiles of slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped import KeyMask, by_kv_head, check_shapes, scores, visible
from pallas_kernels.row_attention import online, reference
from pallas_kernels.row_attention.reference import RowAttention, shaped

SCORE_BYTES = 2**28  # float32 scores of one tile: 256 MiB


def row_attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    tile: int | None = None,
) -> RowAttention:
    """As the reference, `tile` slots at a time; None takes as many as `SCORE_BYTES` allow.

    K and V are sliced, never copied or padded: the last tile begins early and skips what was seen.
    """
    check_shapes(q, k, mask, lengths)
    slots = k.shape[1]
    if not slots:
        return reference.row_attention(q, k, v)
    rows, allowed = by_kv_head(q, k.shape[2]), visible(k, mask, lengths)
    tile = min(tile or max(SCORE_BYTES // max(4 * q.size // q.shape[3], 1), 128), slots)

    def step(running, first):
        begin = jnp.minimum(first, slots - tile)
        part = lambda x: jnp.swapaxes(jax.lax.dynamic_slice_in_dim(x, begin, tile, axis=1), 1, 2)
        seen = jax.lax.dynamic_slice_in_dim(allowed, begin, tile, axis=2)
        seen = seen & (begin + jnp.arange(tile) >= first)
        values = jnp.where(seen[..., None], part(v), 0)
        return online.update(running, scores(rows, part(k)), seen[:, :, None], values), None

    firsts = jnp.arange(0, slots, tile, dtype=jnp.int32)
    if slots <= tile:
        running, _ = step(online.init(rows.shape), firsts[0])
    else:
        running, _ = jax.lax.scan(step, online.init(rows.shape), firsts)
    return shaped(q, *online.finalize(running))
