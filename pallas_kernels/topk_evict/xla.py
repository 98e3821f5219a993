"""`topk_evict` by XLA: comparison of pairs or bisection, and a list of what is kept."""

import functools
from collections.abc import Callable

import jax
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

    return listed(keep, width).reshape(*heads, width)


def listed(marked: Bool[Array, "n l"], width: int) -> Int[Array, "n {width}"]:
    """The first `width` marked positions of each line in ascending order, padded with l."""
    # CPUs compile a sort in a quarter of the time, TPUs in a multiple of it.
    by_sort, by_rank = (functools.partial(by, width=width) for by in (_by_sort, _by_rank))
    return jax.lax.platform_dependent(marked, cpu=by_sort, default=by_rank)


def _by_sort(marked: Bool[Array, "n l"], width: int) -> Int[Array, "n {width}"]:
    length = marked.shape[1]
    position = jnp.sort(jnp.where(marked, jnp.arange(length, dtype=jnp.int32), length), axis=1)[:, :width]
    return jnp.pad(position, ((0, 0), (0, width - position.shape[1])), constant_values=length)


def _by_rank(marked: Bool[Array, "n l"], width: int) -> Int[Array, "n {width}"]:
    # A position's place in the list is its rank among the marked ones; all others are written nowhere.
    place = jnp.where(marked, jnp.cumsum(marked, axis=1) - 1, width)
    position = jnp.broadcast_to(jnp.arange(marked.shape[1], dtype=jnp.int32), marked.shape)
    empty = jnp.full((len(marked), width), marked.shape[1], jnp.int32)
    return empty.at[jnp.arange(len(marked))[:, None], place].set(position, mode="drop")
