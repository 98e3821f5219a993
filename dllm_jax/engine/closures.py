"""Values that the methods of a policy or sampler read outside of its fields, which a program cannot know of.

A compiled program is found again by the class and the fields of a policy. What a method finds in the function
around its class, or in its module, is a constant of that program. Numbers, words and containers of them join
the program's key; an array would go unnoticed where another takes its place, and is refused.
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

Constants = tuple[tuple[str, str], ...]  # where each was read, and its type and value in words


def constants(options: Options, name: str) -> Constants:
    """The numbers, words and containers that methods of a user's class read outside of it.

    Methods are looked at, not the functions that they call.

    Args:
      options: a policy or a sampler.
      name: Name of the argument.

    Raises:
      ValueError: a method reads an array, alone or in a container, and what to do instead.
    """
    found = []
    for method, variable, value in _read(type(options)):
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, jax.Array | np.ndarray):
                raise ValueError(
                    f"{name}: {method} reads {variable}, an array {leaf.dtype}{list(leaf.shape)} outside of "
                    "the class. A compiled program would keep its first value. Pass "
                    "arrays as interventions=(dj.Intervention.patch(..),), numbers as fields "
                    "(docs/how-to/seeing-inside.md)"
                )
        if isinstance(value, int | float | complex | str | bytes | bytearray | list | tuple | dict | set):
            found.append((f"{method}.{variable}", f"{type(value).__name__} {value!r}"))

    # Policies may be made of others, and of parts.
    parts = (getattr(options, field.name) for field in dataclasses.fields(options))
    return (*found, *(one for part in parts if isinstance(part, Options) for one in constants(part, name)))


def _read(cls: type) -> Iterator[tuple[str, str, Any]]:
    """Method, variable and value of what methods of users' classes read around them and in their modules."""
    users = (
        c for c in cls.__mro__ if issubclass(c, Options) and c.__module__.partition(".")[0] != "dllm_jax"
    )
    for owner in users:
        for name, member in vars(owner).items():
            # Without what decorates it; not the methods that `dataclasses` writes.
            held = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            function = inspect.unwrap(held) if callable(held) else held
            if not isinstance(function, types.FunctionType) or function.__code__.co_filename == "<string>":
                continue
            around = inspect.getclosurevars(function).nonlocals
            module = {n: function.__globals__.get(n) for n in _global_names(function.__code__)}
            for variable, value in {**around, **module}.items():
                yield f"{owner.__qualname__}.{name}", variable, value


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that code, and the functions inside of it, look up in their module."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return tuple(sorted(own.union(*map(_global_names, inner))))
