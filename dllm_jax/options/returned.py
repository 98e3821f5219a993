"""Checks of what methods return that users write: shape, dtype and structure, once, while JAX traces them.

A base class has a table of its methods (`Options._returns`). The methods of a user's class are wrapped when
the class is made, so that whoever calls them gets what the table says, or

    ValueError: Mine.transfer returned int32[3], must be Bool[b c], here [3, 8]. ...

Methods of the library are not wrapped: its tests look at them.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
Returns = Callable[..., Any]  # (options, name of the method, what it returned, *its arguments) -> the same

KINDS = {"Bool": jnp.bool_, "Int": jnp.integer, "Float": jnp.floating}
_NOT_KNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def returned(options: Any, method: str, value: Any, expected: str, **sizes: int) -> Any:
    """Returns an array that a method has returned, if it is what it must be.

    Args:
      options: The policy, sampler or constraint.
      method: Name of its method, and of a part of what it returns.
      value: What it has returned.
      expected: Kind and axes, as "Bool[b c]". An axis with "#" may have length 1, and is broadcast.
      **sizes: Length of each axis.

    Raises:
      ValueError: It is no array, or has another dtype or shape.
    """
    kind, _, axes = expected.removesuffix("]").partition("[")
    shape = tuple(sizes[axis.removeprefix("#")] for axis in axes.split())
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if is_array and jnp.issubdtype(value.dtype, KINDS[kind]) and len(value.shape) == len(shape):
        if value.shape == shape:
            return value
        pairs = zip(axes.split(), value.shape, shape, strict=True)
        if all(size == length or (axis[0] == "#" and size == 1) for axis, size, length in pairs):
            return jnp.broadcast_to(jnp.asarray(value), shape)
    raise ValueError(
        f"{type(options).__name__}.{method} returned {_described(value)}, must be "
        f"{expected.replace('#', '')}, here {list(shape)}. {_remedy(value, expected)}"
    )


def like(options: Any, method: str, value: T, before: T, what: str) -> T:
    """Returns a tree of arrays that a method has returned, if it has the structure of the one before.

    Args:
      options: The policy or sampler.
      method: Name of its method, and of a part of what it returns.
      value: What it has returned.
      before: The tree that it must be like.
      what: Where that comes from, in words.

    Raises:
      ValueError: A leaf has another shape or dtype, or the structure is another one.
    """
    name = f"{type(options).__name__}.{method}"
    if jax.tree.structure(value) != jax.tree.structure(before):
        raise ValueError(
            f"{name} returned {_outline(value)}, must be {_outline(before)}, {what}. Its structure stays the "
            "same from step to step."
        )
    old = jax.tree.leaves(before)
    for (path, new), leaf in zip(jax.tree_util.tree_flatten_with_path(value)[0], old, strict=True):
        if jnp.shape(new) != jnp.shape(leaf) or jnp.result_type(new) != jnp.result_type(leaf):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} returned {_described(new)}, must be {_described(leaf)}, "
                f"{what}. Use .astype or another shape."
            )
    return value


def instance(options: Any, method: str, value: Any, kind: type[T]) -> T:
    """Returns what a method has returned, if it is of this class.

    Raises:
      ValueError: It is not.
    """
    if isinstance(value, kind):
        return value
    raise ValueError(
        f"{type(options).__name__}.{method} returned {_described(value)}, must be a {kind.__name__}. Return "
        "the one that it got, or a changed copy of it."
    )


def check_methods(cls: type, returns: Mapping[str, Returns]):
    """Wraps those methods of a user's class that are in the table, so that what they return is checked."""
    if is_ours(cls.__module__):
        return
    for name, check in returns.items():
        if isinstance(function := vars(cls).get(name), FunctionType):
            setattr(cls, name, _checked(function, name, check))


def _checked(function: FunctionType, name: str, check: Returns) -> Callable[..., Any]:
    """A method whose result is checked, and whose errors about values that are not known name it."""

    @functools.wraps(function)
    def method(options: Any, *args: Any, **named: Any) -> Any:
        try:
            value = function(options, *args, **named)
        except _NOT_KNOWN as error:
            raise ValueError(_not_known(options, name, error.__traceback__)) from error
        return check(options, name, value, *args, *named.values())

    return method


def _not_known(options: Any, method: str, trace: TracebackType | None) -> str:
    """Says which option a method reads as a number of Python's while it is traced, as in `if self.x > 0`."""
    numbers = [name for name, number in vars(options).items() if isinstance(number, jax.Array)]
    read = {name for frame, line in _users_frames(trace) for name in _attributes_at(frame, line)}
    names = [name for name in numbers if name in read] or numbers
    options_named = f", such as its option {' or '.join(map(repr, names))}," if names else ""
    return (
        f"{type(options).__name__}.{method} needs the value of an array{options_named} which is not known "
        "while the program is traced: traced options are its arguments. Use jnp.where instead of `if`, or "
        "annotate the option without Traced (PositiveInt, Fraction): each value then has a program of its own"
    )


def _users_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of a traceback outside of the library and of JAX, with the line of each."""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if not is_ours(module) and module.partition(".")[0] not in ("jax", "contextlib"):
            yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _attributes_at(frame: FrameType, line: int) -> list[str]:
    """The attributes that a line of a frame reads."""
    steps = dis.get_instructions(frame.f_code)
    return [
        str(step.argval)
        for step in steps
        if step.opname == "LOAD_ATTR" and step.positions and step.positions.lineno == line
    ]


def is_ours(module: str) -> bool:
    """Whether a module, by its name, belongs to the library."""
    return module.partition(".")[0] == "dllm_jax"


def users_own(options: Any, *methods: str) -> bool:
    """Whether one of these methods is defined outside of the library."""
    functions = (inspect.getattr_static(type(options), method) for method in methods)
    return not all(is_ours(getattr(function, "__module__", None) or "") for function in functions)


def _described(value: Any) -> str:
    """An array as its dtype and shape, anything else by its class."""
    if value is None:
        return "None"
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}"


def _outline(tree: Any) -> str:
    """A tree of arrays by the places of its leaves."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if jax.tree.structure(tree) == jax.tree.structure(0):
        return _described(tree)
    places = ", ".join(f"{jax.tree_util.keystr(path)} {_described(leaf)}".strip() for path, leaf in leaves)
    return f"{type(tree).__name__}({places})"


def _remedy(value: Any, expected: str) -> str:
    """Advises on an array that is not as it must be."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        return "Return an array."
    if "#" in expected:
        return "A condition of each sequence may be Bool[b 1]: index it by [:, None], or pass keepdims=True."
    return "Compare, cast or index it."
