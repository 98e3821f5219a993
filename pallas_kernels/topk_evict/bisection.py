"""The best scores of each head without sorting, by bisection.

A head keeps all scores above some threshold, and of those equal to it the first ones. Bit by bit, from the
highest, the threshold is found as the largest value that enough scores reach, then the position after its
last tie kept. Only comparisons, counts and loops, so the same code is XLA's implementation and the body of
the kernels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SIGN = -(2**31)


def best(score: Float[Array, "n l"], count: Int[Array, "n 1"]) -> Bool[Array, "n l"]:
    """The `count` largest of each of n heads, ties to the lower position, never one of -inf or NaN."""
    score = jnp.where(score > -jnp.inf, score, -jnp.inf)
    keys = _ordered(score)

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
    """The body of the kernels: 1 where `best` keeps."""
    keep_ref[...] = best(score_ref[...], count_ref[...]).astype(jnp.int32)


def _ordered(score: Float[Array, "n l"]) -> Int[Array, "n l"]:
    """Integers in the order of the floats; 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _count(true: Bool[Array, "n l"]) -> Int[Array, "n 1"]:
    return jnp.sum(true.astype(jnp.int32), axis=1, keepdims=True, dtype=jnp.int32)
