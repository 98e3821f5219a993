"""Reference implementation of `topk_evict` in plain jnp: two sorts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def topk_evict(
    score: Float[Array, "b k l"], count: Int[Array, "b k"], width: int
) -> Int[Array, "b k {width}"]:
    """Positions of the `count` best scores of each head, ascending, padded with l.

    Ties go to the lower position. Scores of -inf and NaN are never kept, so there may be fewer than `count`;
    a score of inf is kept before all others, so what must be kept whatever its importance gets one.

    Args:
      score: importance of each position for each KV head, float32; larger is kept first.
      count: Number of positions that each head retains, at most `width`.
      width: static width of the result.
    """
    check_options(score, width)
    length = score.shape[2]
    score = jnp.where(score > -jnp.inf, score, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-score, axis=2, stable=True), axis=2)
    keep = (rank < jnp.minimum(count, width)[..., None]) & (score > -jnp.inf)
    chosen = jnp.where(keep, jnp.arange(length, dtype=jnp.int32), length)
    return jnp.sort(jnp.pad(chosen, ((0, 0), (0, 0), (0, width)), constant_values=length), axis=2)[
        ..., :width
    ]


def check_options(score: Float[Array, "b k l"], width: int) -> None:
    """Refuses invalid options.

    Raises:
      ValueError: a negative width, or scores that are not float32.
    """
    if width < 0:
        raise ValueError(f"width={width} must be at least 0")
    if score.dtype != jnp.float32:
        raise ValueError(f"score is {score.dtype}, must be float32")
