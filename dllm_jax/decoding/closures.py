"""Values that the methods of a policy or sampler read outside of its fields, which a program cannot know of.

A compiled program is found again by the class and the fields of a policy. An array that a method finds in
the function around its class, or in its module, is a constant of that program: another one in its place would
go unnoticed, and the old one would go on being used.
"""

import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dllm_jax.options import Options

DATA = jax.Array | np.ndarray | list | dict | set | bytearray
CONSTANTS = int | float | complex | str | bytes  # True and False among them
Constants = tuple[tuple[str, type, Any], ...]


def constants(options: Options, name: str) -> Constants:
    """The numbers and words that methods of a user's class read outside of it: programs differ by them.

    Methods are looked at, not the functions that they call.

    Args:
      options: a policy or a sampler.
      name: what the user calls it.

    Raises:
      ValueError: a method reads an array, or a container that can change: it would be used as it was when
        the program was compiled.
    """
    found = []
    for cls in type(options).__mro__:
        if cls.__module__.partition(".")[0] == "dllm_jax" or not issubclass(cls, Options):
            continue
        for method, function in _functions(cls):
            for variable, value in _read(function):
                if isinstance(value, DATA):
                    raise ValueError(
                        f"{name}: {cls.__qualname__}.{method} reads {variable}, {_kind(value)} outside of "
                        "the class. A compiled program would go on with what it was when it was compiled: "
                        "pass arrays as interventions=(dj.Intervention.patch(..),), numbers as fields "
                        "(docs/seeing-inside.md)"
                    )
                if isinstance(value, CONSTANTS):
                    found.append((f"{cls.__qualname__}.{method}.{variable}", type(value), value))

    # Policies may be made of others, and of parts.
    parts = (getattr(options, field.name) for field in dataclasses.fields(options))
    return (*found, *(one for part in parts if isinstance(part, Options) for one in constants(part, name)))


def _functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions that a class defines, without what decorates them; not those of `dataclasses`."""
    for name, member in vars(cls).items():
        held = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        function = inspect.unwrap(held) if callable(held) else held
        if isinstance(function, types.FunctionType) and function.__code__.co_filename != "<string>":
            yield name, function


def _read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Variables of the function around it and of its module that a function reads, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in _globals(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]


@functools.cache
def _globals(code: types.CodeType) -> tuple[str, ...]:
    """Names that code, and the functions inside of it, look up in their module."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return tuple(sorted(own.union(*map(_globals, inner))))


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"
