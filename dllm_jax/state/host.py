"""Operations on small arrays done on the host, because XLA would compile a program for each size."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Shaped


def place(array: ArrayLike, dtype: DTypeLike) -> Array:
    """The array on the device; `jnp.asarray` (jax 0.10) compiles a copy."""
    if isinstance(array, Tracer):
        return array.astype(dtype)
    return jax.device_put(np.asarray(array, dtype))


def ones(shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """A mask that is True everywhere."""
    return place(np.ones(shape), bool)


def pad(array: Shaped[Array, "b p"], left: int, right: int, value: int | bool) -> Shaped[Array, "b q"]:
    """The array with more columns on either side; traced arrays are padded in the program they belong to."""
    widths = ((0, 0), (left, right))
    if isinstance(array, Tracer):
        return jnp.pad(array, widths, constant_values=value)
    return place(np.pad(np.asarray(array), widths, constant_values=value), array.dtype)


def part(array: Shaped[Array, "..."], *index: slice) -> Shaped[Array, "..."]:
    """`array[index]`; waits for the array and takes it to the host and back, unless that is all of it."""
    if isinstance(array, Tracer):
        return array[index]
    if all(s.indices(size) == (0, size, 1) for s, size in zip(index, array.shape, strict=False)):
        return array
    return place(np.asarray(array)[index], array.dtype)
