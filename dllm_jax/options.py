"""Checks of options: each takes a frozen dataclass in its `__post_init__`, and refuses wrong values.

Python does not check annotations, and a wrong value may do something else than it says: a refresh every 2.5
steps, counted in whole ones, is one every 5. Numbers of NumPy become Python's and sequences become tuples, so
that options stay hashable and print as they are written.
"""

import math
import numbers
from typing import Any

import jax
import numpy as np


def check_integers(
    options: Any, *names: str, least: int, most: int | None = None, odd: bool = False, none: str = ""
):
    """Whole numbers in [least, most].

    Args:
      options: the dataclass.
      names: its fields.
      least: the smallest value.
      most: the largest value, if there is one.
      odd: even values are refused too.
      none: what None means; empty if it means nothing.

    Raises:
      ValueError: another value; a bool is none.
    """
    span = f"of at least {least}" if most is None else f"in {least}..{most}"
    kind = "an odd" if odd else "a whole"
    for name in names:
        value = getattr(options, name)
        if none and value is None:
            continue
        if (
            not is_integer(value)
            or value < least
            or (most is not None and value > most)
            or (odd and value % 2 == 0)
        ):
            also = f", or None for {none}" if none else ""
            raise ValueError(f"{name}={value!r} must be {kind} number {span}{also}")
        object.__setattr__(options, name, int(value))


def check_numbers(
    options: Any,
    *names: str,
    least: float = -math.inf,
    most: float = math.inf,
    above: float | None = None,
    below: float | None = None,
    none: str = "",
):
    """Finite numbers.

    Args:
      options: the dataclass.
      names: its fields.
      least: the smallest value.
      most: the largest value.
      above: all values lie above it; instead of `least`.
      below: all values lie below it; instead of `most`.
      none: what None means; empty if it means nothing.

    Raises:
      ValueError: another value, NaN, or no number; a bool is none.
    """
    low, high = least if above is None else above, most if below is None else below
    for name in names:
        value = getattr(options, name)
        if none and value is None:
            continue
        fits = _finite(value) and low <= value <= high and value != above and value != below
        if not fits:
            begin = "(" if above is not None or low == -math.inf else "["
            end = ")" if below is not None or high == math.inf else "]"
            also = f", or None for {none}" if none else ""
            raise ValueError(f"{name}={value!r} must be a number in {begin}{low}, {high}{end}{also}")
        object.__setattr__(options, name, value if isinstance(value, int) else float(value))


def check_flags(options: Any, *names: str):
    """True or False.

    Raises:
      ValueError: another value, 0 and 1 included.
    """
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}={value!r} must be True or False")
        object.__setattr__(options, name, bool(value))


def check_choice(options: Any, name: str, *allowed: str):
    """One of a few words.

    Raises:
      ValueError: another value.
    """
    value = getattr(options, name)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_kinds(options: Any, **kinds: type):
    """Fields, by name, that hold an instance of a class.

    Raises:
      ValueError: another value; the class itself is none.
    """
    for name, kind in kinds.items():
        value = getattr(options, name)
        if not isinstance(value, kind):
            default = options.__dataclass_fields__[name].default
            raise ValueError(f"{name}={value!r} must be a {kind.__name__}, such as {default!r}")


def check_profile(options: Any, name: str):
    """A number per layer: a sequence or an array, of which a tuple is made.

    Raises:
      ValueError: no sequence, an empty one, or one with something else than finite numbers.
    """
    value = getattr(options, name)
    items = value.tolist() if isinstance(value, np.ndarray | jax.Array) else value
    if not isinstance(items, list | tuple) or not items or not all(map(_finite, items)):
        raise ValueError(f"{name}={value!r} must be finite numbers, one per layer")
    object.__setattr__(options, name, tuple(map(float, items)))


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number, of Python or NumPy; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
