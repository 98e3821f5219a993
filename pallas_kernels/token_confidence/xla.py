"""`token_confidence` by XLA: a scan over vocabulary tiles."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.token_confidence import online
from pallas_kernels.token_confidence.reference import TokenConfidence, product, vocabulary_size

LOGIT_BYTES = 2**26  # float32 logits of one tile: 64 MiB


def token_confidence(
    hidden: Float[Array, "b c m"],
    head: Float[Array, "v m"],
    valid: int | None = None,
    forbidden: int | None = None,
    tile: int | None = None,
) -> TokenConfidence:
    """As the reference, with logits of `tile` tokens at a time; None takes as many as `LOGIT_BYTES` allow.

    The head is sliced, never copied or padded: the last tile begins early and skips what was seen.
    """
    valid = vocabulary_size(head, valid, forbidden)
    positions = hidden.reshape(-1, hidden.shape[-1])
    tile = min(tile or max(LOGIT_BYTES // max(4 * positions.shape[0], 1), 128), head.shape[0])
    last = head.shape[0] - tile

    def step(running, first):
        begin = jnp.minimum(first, last)
        logits = product(positions, jax.lax.dynamic_slice_in_dim(head, begin, tile))
        ids = jnp.broadcast_to(begin + jnp.arange(tile, dtype=jnp.int32), logits.shape)
        return online.update(running, logits, ids, first, valid, forbidden), None

    firsts = jnp.arange(0, valid, tile, dtype=jnp.int32)
    running, _ = jax.lax.scan(step, online.init(positions.shape[0]), firsts)
    return TokenConfidence(*(x.reshape(hidden.shape[:-1]) for x in online.finalize(running)))
