"""What `topk_evict` means, in plain jnp: two sorts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def topk_evict(
    score: Float[Array, "b k l"],
    among: Bool[Array, "b l"],
    count: Int[Array, "b k"],
    width: int,
    pool: int = 1,
) -> Int[Array, "b k {width}"]:
    """Positions of the `count` best scores of each head, ascending, padded with l.

    As `max_pool`, `best` and `compact` of `dllm_jax.state` per head. Ties go to the lower
    position; a score of -inf is never kept, so there may be fewer than `count`. What stands outside of
    `among` has no influence, NaN included.

    Args:
      score: importance of each position for each kv head, float32; larger is kept first.
      among: positions that may be kept.
      count: how many each head keeps; at most `width` are.
      width: static width of the result.
      pool: odd window of the maximum over neighbours within `among`: what lies between two members does not
        part them, and at the ends the window is cut. 1 pools nothing.
    """
    check_options(score, width, pool)
    length = score.shape[2]
    index, packed = pooled(score, among, pool)
    rank = jnp.argsort(jnp.argsort(-packed, axis=2, stable=True), axis=2)
    keep = (rank < jnp.minimum(count, width)[..., None]) & (packed > -jnp.inf)
    chosen = jnp.where(keep, index[:, None], length)
    return jnp.sort(jnp.pad(chosen, ((0, 0), (0, 0), (0, width)), constant_values=length), axis=2)[
        ..., :width
    ]


def pooled(
    score: Float[Array, "b k l"], among: Bool[Array, "b l"], pool: int
) -> tuple[Int[Array, "b l"], Float[Array, "b k l"]]:
    """Positions, and their pooled scores; the members of `among` before the others, which have -inf."""
    length = score.shape[2]
    if pool == 1:
        index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), among.shape)
        return index, jnp.where(among[:, None], score, -jnp.inf)
    index = jnp.argsort(~among, axis=1, stable=True).astype(jnp.int32)
    members = jnp.arange(length) < jnp.sum(among, axis=1, keepdims=True)
    packed = jnp.take_along_axis(score, index[:, None], axis=2)
    packed = jnp.where(members[:, None], packed, -jnp.inf)
    best = jax.lax.reduce_window(packed, -jnp.inf, jax.lax.max, (1, 1, pool), (1, 1, 1), "SAME")
    return index, jnp.where(members[:, None], best, -jnp.inf)


def check_options(score: Float[Array, "b k l"], width: int, pool: int) -> None:
    """Refuses invalid options.

    Raises:
      ValueError: a width that is not positive, a window that is not odd, or scores that are not float32.
    """
    if width < 1:
        raise ValueError(f"width={width} must be at least 1")
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"pool={pool} must be odd and positive")
    if score.dtype != jnp.float32:
        raise ValueError(f"score is {score.dtype}, must be float32")
