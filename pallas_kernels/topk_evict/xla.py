"""`topk_evict` by XLA: bisection, and a scatter to list what is kept."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.topk_evict import bisection
from pallas_kernels.topk_evict.reference import check_options, pooled

Best = Callable[[Float[Array, "n l"], Int[Array, "n 1"]], Bool[Array, "n l"]]


def topk_evict(
    score: Float[Array, "b k l"],
    among: Bool[Array, "b l"],
    count: Int[Array, "b k"],
    width: int,
    pool: int = 1,
    best: Best = bisection.best,
) -> Int[Array, "b k {width}"]:
    """As the reference; `best` marks the `count` largest of each head."""
    check_options(score, width, pool)
    index, packed = pooled(score, among, pool)
    length = score.shape[2]
    keep = best(packed.reshape(-1, length), jnp.minimum(count, width).reshape(-1, 1).astype(jnp.int32))
    place = jnp.cumsum(keep, axis=1) - 1
    place = jnp.where(keep, place, width)
    positions = jnp.repeat(index, score.shape[1], axis=0)
    kept = jnp.full((keep.shape[0], width), length, jnp.int32)
    kept = kept.at[jnp.arange(keep.shape[0])[:, None], place].set(positions, mode="drop")
    return kept.reshape(*score.shape[:2], width)
