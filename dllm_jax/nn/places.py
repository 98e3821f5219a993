"""Places inside of the network by name, and the layers, positions and steps that are meant there.

`residual` is the stream that enters a layer: `residual` at layer i + 1 is what layer i returns, and at layer
n (after the last one) what the final norm reads. Keys are rotated, as caches hold them. The outputs of both
branches are what is added to the stream.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from dllm_jax.options import shown

Indices = int | Sequence[int] | Sequence[Sequence[int]] | range | Int[np.ndarray, "..."] | Int[Array, "..."]


def indices(name: str, value: Any, ndim: int = 1) -> Int[np.ndarray, "..."] | Int[Array, "..."]:
    """Whole numbers that choose layers, positions or steps, as int32; one number becomes a line of one.

    Args:
      name: Name of the argument.
      value: Value to check.
      ndim: the most axes that are allowed.

    Raises:
      ValueError: no whole numbers of at least 0, or of too many axes, or none at all.
    """
    rule = f"{name}={shown(value)} must be whole numbers of at least 0: one, or a sequence of them"
    rule += " (or one sequence per sequence of the batch)" if ndim == 2 else ""
    array = array_of(value, rule)
    # Booleans are no integers here: a mask instead of indices would choose layers 0 and 1.
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim > ndim or not array.size:
        raise ValueError(rule)
    if isinstance(array, jax.Array):
        return jnp.atleast_1d(array).astype(jnp.int32)
    if array.min() < 0:
        raise ValueError(rule)
    return np.atleast_1d(array).astype(np.int32)


def array_of(value: Any, rule: str) -> np.ndarray | jax.Array:
    """A user's numbers as an array, on the host unless traced; raises ValueError(rule) if they are none."""
    try:
        return value if isinstance(value, Tracer) else np.asarray(value)
    except ValueError as error:
        raise ValueError(rule) from error


def within(name: str, array: Int[np.ndarray, "..."] | Int[Array, "..."], end: int, what: str):
    """Raises ValueError for numbers out of range; traced ones are not checked.

    Args:
      name: Name of the argument.
      array: Numbers returned by `indices`.
      end: Upper bound, exclusive.
      what: Words of the message before the range.

    Raises:
      ValueError: a number of at least `end`.
    """
    if isinstance(array, np.ndarray) and array.max() >= end:
        raise ValueError(f"{name}={array.max()} is out of range: {what} 0 to {end - 1}.")


def distinct(name: str, array: Int[np.ndarray, "..."] | Int[Array, "..."]):
    """Raises ValueError if a line of indices holds a number twice."""
    if isinstance(array, np.ndarray) and any(len(set(line)) < len(line) for line in np.atleast_2d(array)):
        raise ValueError(f"{name}={array.tolist()} hold a number twice")
