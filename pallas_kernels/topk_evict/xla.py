"""`topk_evict` in plain jnp: its definition by two sorts, the form for XLA, and shapes for tests and benches.

XLA's form compares pairs, or bisects: a head keeps all scores above some threshold, and of those equal to it
the first ones. Bit by bit, from the highest, the threshold is found as the largest value that enough scores
reach, then the position after its last tie kept. Only comparisons, counts and loops, so the same code is the
body of the kernels.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.counting import count_marked

FEW = 128  # entries of which ranks are counted in two parts: more would not lie well on TPUs
COMPARABLE = 2048  # entries of which all pairs are compared: 4 million, less work than the passes of a sort
SIGN = -(2**31)


class Shape(NamedTuple):
    """One call: scores [batch, heads, length], at most `width` kept."""

    batch: int
    heads: int
    length: int
    width: int


SMALL = [  # interpreted on a CPU; the first in every test run
    Shape(3, 3, 257, 40),  # more than one tile of heads
    Shape(1, 7, 9, 4),
    Shape(1, 1, 1, 1),
    Shape(2, 4, 130, 130),
    Shape(1, 2, 300, 320),
]
MODELS = {
    "llada-8b, Sparse-dLLM, prompt 4096": Shape(1, 1, 4352, 2176),
    "llada-8b, MaskKV, prompt 4096": Shape(1, 32, 4096, 1024),
    "llada-8b, MaskKV, prompt 32768": Shape(1, 32, 32768, 1024),
    "dream-7b, batch 8": Shape(8, 4, 4096, 512),
}


def reference(
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


def best(score: Float[Array, "n l"], count: Int[Array, "n 1"]) -> Bool[Array, "n l"]:
    """The `count` largest of each of n lines, ties to the lower index, and never one of -inf or NaN.

    There is no sort: one of 1000 entries takes the TPU compiler several seconds, in every step variant.
    """
    # Few pairs are compared at once; many cost more than the 32 passes of a bisection.
    if score.shape[0] * score.shape[1] ** 2 > COMPARABLE**2:
        return bisected(score, count)
    score = jnp.where(score > -jnp.inf, score, -jnp.inf)
    return (ranks(score) < count) & (score > -jnp.inf)


def ranks(priority: Float[Array, "*b c"]) -> Int[Array, "*b c"]:
    """Rank of each entry along the last axis, 0 for the largest, ties to the lower index; no NaN."""
    if priority.shape[-1] > COMPARABLE:
        return jnp.argsort(jnp.argsort(-priority, axis=-1, stable=True), axis=-1)

    # An entry's rank is the number of larger ones, and of equal ones before it. It is not compared with
    # itself: XLA may compute the two sides apart, and round them differently.
    mine, other = priority[..., :, None], priority[..., None, :]
    index = jnp.arange(priority.shape[-1])
    itself = index[None, :] == index[:, None]
    ahead = ~itself & ((other > mine) | ((other == mine) & (index[None, :] < index[:, None])))
    return count_marked(ahead, FEW)


def bisected(score: Float[Array, "n l"], count: Int[Array, "n 1"]) -> Bool[Array, "n l"]:
    """The `count` largest of each of n heads, ties to the lower position, never one of -inf or NaN."""
    score = jnp.where(score > -jnp.inf, score, -jnp.inf)
    keys = ordered(score)

    # The largest integer that at least `count` keys reach.
    def value_bit(i, threshold):
        # Bit 31 is the sign: setting it leads from below up to 0.
        higher = threshold ^ jax.lax.shift_left(jnp.int32(1), 31 - i)
        return jnp.where(_count(keys >= higher) >= count, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, value_bit, jnp.full_like(count, SIGN))

    # What is above it is kept; the ties fill up, lowest positions first: `end` is the furthest that is not
    # too far.
    above = keys > threshold
    ties = keys == threshold
    missing = count - _count(above)
    position = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    bits = keys.shape[1].bit_length()

    def position_bit(i, end):
        further = end + jax.lax.shift_left(jnp.int32(1), bits - 1 - i)
        return jnp.where(_count(ties & (position < further)) <= missing, further, end)

    end = jax.lax.fori_loop(0, bits, position_bit, jnp.zeros_like(count))
    return (above | (ties & (position < end))) & (score > -jnp.inf)


def kernel(score_ref, count_ref, keep_ref):
    """The body of the kernels: 1 where `bisected` keeps."""
    keep_ref[...] = bisected(score_ref[...], count_ref[...]).astype(jnp.int32)


def ordered(score: Float[Array, "n l"]) -> Int[Array, "n l"]:
    """Integers in the order of the floats; 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _count(true: Bool[Array, "n l"]) -> Int[Array, "n 1"]:
    return jnp.sum(true.astype(jnp.int32), axis=1, keepdims=True, dtype=jnp.int32)


Best = Callable[[Float[Array, "n l"], Int[Array, "n 1"]], Bool[Array, "n l"]]


def topk_evict(
    score: Float[Array, "b k l"], count: Int[Array, "b k"], width: int, best: Best = best
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
