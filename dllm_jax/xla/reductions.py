"""Counts, places and maxima in few kernels.

`count_marked` and `any_marked` lie in `pallas_kernels`, whose operations use them too.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.counting import any_marked as any_marked
from pallas_kernels.counting import count_marked as count_marked

FEW = 32  # entries of a list that are compared with each position
MANY = 1024  # of fewer, a second pass saves a CPU microseconds, and its kernels take longer to compile


def place_by_comparison(index: Int[Array, "b q"], position: Int[Array, "#b c"]) -> Int[Array, "b c"]:
    """The place of each position in a list of at most `FEW`, q if it is not there.

    Symptom: A scatter that inverts the list is four kernels, a comparison with all entries is one.
    Seen on: CPU, jaxlib 0.10.2.
    Cost: Compiling one list, before 0.11 CPU seconds, after 0.04; `DualCache` has 17 kernels fewer.
    Test: test_xla.py::test_short_lists_are_inverted_without_a_scatter
    """
    place = jnp.arange(index.shape[1], dtype=jnp.int32)[:, None]
    return jnp.min(jnp.where(index[:, :, None] == position[:, None], place, index.shape[1]), axis=1)


def argmax(x: Float[Array, "*b v"]) -> Int[Array, "*b"]:
    """The place of the largest value, of equal ones the lowest; any place where a value is NaN.

    Symptom: A reduction that carries the place along compares one number after the other.
    Seen on: CPU (Intel Xeon), jaxlib 0.10.2.
    Cost: 256 rows of 4096 values, before 3.8 ms, after (by two passes) 1.1.
    Test: test_xla.py::test_the_largest_of_many_values_is_found_in_two_reductions_on_cpus
    """

    def in_two_passes(x):
        below = x < jnp.max(x, axis=-1, keepdims=True)
        places = jnp.arange(x.shape[-1], dtype=jnp.int32)
        return jnp.min(jnp.where(below, x.shape[-1], places), axis=-1)

    once = lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)
    if x.shape[-1] < MANY:
        return once(x)
    return jax.lax.platform_dependent(x, cpu=in_two_passes, default=once)
