"""The best of each row without sorting: bit by bit, the value of the last one kept, then its position.

Only comparisons, counts and loops, so the same code is XLA's implementation and the body of the kernels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SIGN = -(2**31)


def best(score: Float[Array, "r l"], count: Int[Array, "r 1"]) -> Bool[Array, "r l"]:
    """The `count` largest of each row, ties to the lower index, never one of -inf."""
    keys = _ordered(score)

    def value_bit(i, threshold):
        higher = threshold ^ jax.lax.shift_left(
            jnp.int32(1), 31 - i
        )  # bit 31 is the sign: from below up to 0
        return jnp.where(_count(keys >= higher) >= count, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, value_bit, jnp.full_like(count, SIGN))
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


def _ordered(score: Float[Array, "r l"]) -> Int[Array, "r l"]:
    """Integers in the order of the floats; 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _count(true: Bool[Array, "r l"]) -> Int[Array, "r 1"]:
    return jnp.sum(true.astype(jnp.int32), axis=1, keepdims=True, dtype=jnp.int32)
