"""`topk_evict` by XLA: comparison of pairs or bisection, and a scatter to list what is kept."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.topk_evict import ranking
from pallas_kernels.topk_evict.reference import check_options

Best = Callable[[Float[Array, "n l"], Int[Array, "n 1"]], Bool[Array, "n l"]]


def topk_evict(
    score: Float[Array, "b k l"], count: Int[Array, "b k"], width: int, best: Best = ranking.best
) -> Int[Array, "b k {width}"]:
    """As the reference; `best` marks the `count` largest of each head."""
    check_options(score, width)
    *heads, length = score.shape
    keep = best(score.reshape(-1, length), jnp.minimum(count, width).reshape(-1, 1).astype(jnp.int32))

    # A kept position's place in the list is its rank by position; all others are written nowhere.
    place = jnp.where(keep, jnp.cumsum(keep, axis=1) - 1, width)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), keep.shape)
    kept = jnp.full((keep.shape[0], width), length, jnp.int32)
    kept = kept.at[jnp.arange(keep.shape[0])[:, None], place].set(position, mode="drop")
    return kept.reshape(*heads, width)
