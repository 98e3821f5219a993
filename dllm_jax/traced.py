"""Numbers of options that are arguments of a compiled program, not part of it: ten thresholds compile once.

A field of a policy or a sampler is part of the program by default: another value, another compilation. A
number that decides no shape and no structure need not be. Its annotation says so:

    gamma: Annotated[Number, Traced()] = 0.9
    temperature: Annotated[Number, Ge(0), Traced(unless=0)] = 0.0

Options are pytrees whose leaves are these numbers, float32 or int32; all other fields are static. So a
program that takes options as arguments (`engine.loop.denoise` does) is compiled once for all values, and
policies and samplers can be passed through `jax.jit` and stacked for `jax.vmap`. They may also be made inside
of both: `Threshold(t)` with a traced t is not checked against its range, as nobody knows its value. Options
that `jit` returns have known values: `generate` checks those.

Methods read `self.gamma` as a Python number or an array, whichever it is, and compute with either. What
depends on a value while the program is built asks `fixed_at`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

Number = float | Float[Array, ""]
Count = int | Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Traced:
    """Marks a number that changes neither a shape nor the structure of the program.

    Attributes:
      unless: the one value that does change the structure, such as a temperature of 0, which draws nothing. A
        field that has it is static; a traced number is taken not to have it.
    """

    unless: float | None = None


def is_traced(*numbers: Number | Count | None) -> bool:
    """Whether any of the numbers is an array, whose value is not known while the program is built."""
    return any(isinstance(number, jax.Array) for number in numbers)


def fixed_at(number: Any, value: float) -> bool:
    """Whether a number is `value` in every run of the program; a traced one is not, see `Traced.unless`.

    Neither is whatever else JAX may put in place of a leaf.
    """
    return isinstance(number, int | float | np.number) and bool(number == value)


def scalar(array: Array, kind: type[float] | type[int]) -> Any:
    """An array as the value of a field: a traced one in the dtype of its kind, any other as Python's number.

    Raises:
      ValueError: it is no scalar, or of another kind.
    """
    numeric = jnp.integer if kind is int else jnp.number
    if array.shape or not jnp.issubdtype(array.dtype, numeric):
        raise ValueError
    return array.astype(_DTYPES[kind]) if isinstance(array, Tracer) else array.item()


def argument(number: Any, kind: type[float] | type[int]) -> Any:
    """A number as programs take it, in one dtype for its kind: 1 is 1.0. Other leaves of trees are kept."""
    return _DTYPES[kind](number) if isinstance(number, int | float) else number


_DTYPES = {float: np.float32, int: np.int32}
