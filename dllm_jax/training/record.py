"""The configuration of a run in words, by which a resumed run is compared with the one it goes on from."""

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from dllm_jax.options import check_argument, shown
from dllm_jax.training.setup import Setup
from dllm_jax.training.trainable import Optimizer

Record = dict[str, Any]

SHOWN = 200  # characters of a description in a message
# Options that change no step that was done, but for rounding. "steps" and "decay" are compared by the rates
# that they gave.
FREE = ("steps", "decay", "save_every", "accumulate", "remat")


def record_of(setup: Setup, optimizer: Optimizer | None, labels: PyTree, frozen: PyTree[Array]) -> Record:
    """The configuration as JSON: options, optimizer, what is trained, and the model.

    Args:
      setup: of the run.
      optimizer: what replaces the built-in one, or None.
      labels: of every parameter, see `dllm_jax.training.trainable.labels`.
      frozen: parameters that are not trained, None in place of the others; their checksum is recorded, since
        checkpoints do not hold them.
    """
    paths = jax.tree_util.tree_leaves_with_path(labels)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): label for path, label in paths}
    spec = {f"spec.{name}": value for name, value in dataclasses.asdict(setup.spec).items()}
    record = dataclasses.asdict(setup.config) | {
        "warmup": setup.config.warmup_steps,
        "blocks": None if setup.config.blocks is None else list(setup.config.blocks),
        "optimizer": None if optimizer is None else described(optimizer),
        "trainable": None if all(label is True for label in named.values()) else named,
        "dtype": "/".join(sorted({str(dtype) for dtype in setup.dtypes})),
        "frozen": int(checksum(frozen)),
    }
    return record | spec


def check_unchanged(old: Record, new: Record, step: int, allowed: Collection[str]):
    """Compares the configuration of a checkpoint with the one that goes on from it.

    Args:
      old: of the checkpoint; what it does not mention is not compared.
      new: of the run.
      step: optimiser steps done.
      allowed: names that may differ.

    Raises:
      ValueError: what differs, with both values.
    """
    changed = [name for name in new if name in old and old[name] != new[name] and name not in FREE]
    if _constant_until(old) < step or _constant_until(new) < step:
        changed += [name for name in ("steps", "decay") if old.get(name) != new[name]]
    changed = [name for name in changed if name not in allowed]
    if changed:
        lines = "; ".join(_difference(name, old[name], new[name]) for name in changed)
        raise ValueError(
            f"the run was begun with another configuration: {lines}. Take the old values, another directory, "
            f"or go on with the new ones: allow_changes={changed!r}"
        )


def check_names(allowed: Any, record: Record) -> tuple[str, ...]:
    """The names of what may differ from a run that is resumed.

    Raises:
      ValueError: they are no names, or not of what a configuration holds.
    """
    if isinstance(allowed, str) or not isinstance(allowed, Collection):
        raise ValueError(f"allow_changes={shown(allowed)} must be names of options, such as ('steps',)")
    names = check_argument("allow_changes", tuple(allowed), tuple[str, ...])
    if unknown := sorted(set(names) - set(record)):
        raise ValueError(f"allow_changes={unknown} must be among {', '.join(record)}")
    return names


def _constant_until(record: Record) -> int:
    """The step at which the built-in optimiser's rate begins to fall."""
    return record["steps"] - record["decay"]


def _difference(name: str, old: Any, new: Any) -> str:
    """Both values; of mappings the first entry that differs, of long descriptions where they part."""
    if isinstance(old, dict) or isinstance(new, dict):
        before, now = (value if isinstance(value, dict) else {} for value in (old, new))
        key = next(key for key in (*before, *now) if before.get(key) != now.get(key))
        return _difference(f"{name}[{key!r}]", before.get(key), now.get(key))
    if isinstance(old, str) and isinstance(new, str):
        differ = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        start = max(0, next(differ, 0) - SHOWN // 4)
        old, new = (("..." if start else "") + text[start:][:SHOWN] for text in (old, new))
    return f"{name}={old!r} then, {new!r} now"


@jax.jit
def checksum(arrays: PyTree[Array]) -> Array:
    """The sum of the arrays' bits as whole numbers, modulo 2**32: the same on every mesh."""
    bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * min(a.dtype.itemsize, 4)}"))
    sums = (jnp.sum(bits(array).astype(jnp.uint32), dtype=jnp.uint32) for array in jax.tree.leaves(arrays))
    return sum(sums, start=jnp.uint32(0))


def described(optimizer: Optimizer) -> dict[str, str]:
    """How the transformation (or each of a mapping) begins and updates, in words."""
    if isinstance(optimizer, Mapping):
        named = {name: described(each) for name, each in optimizer.items() if each is not None}
        return {f"{name}.{part}": text for name, parts in named.items() for part, text in parts.items()}
    return {"update": describe(optimizer.update), "init": describe(optimizer.init)}


def describe(function: Any) -> str:
    """A part of a transformation in words: the functions it is made of, with the numbers that they hold.

    Transformations of optax are closures, without a name or options to ask for. Written are the names of
    functions and what they close over: `chain(update_fns=(scale_by_adam(b1=0.9, ...), ...))`. Equal
    descriptions mean functions of the same names that hold the same numbers.
    """
    return _describe(function, ())


def _describe(value: Any, open_: tuple[int, ...]) -> str:
    inner = functools.partial(_describe, open_=(*open_, id(value)))
    if id(value) in open_:
        return "..."
    match value:
        case None | bool() | int() | float() | str() | complex():
            return repr(value)
        case _ if hasattr(value, "init") and hasattr(value, "update") and not isinstance(value, type):
            return inner(value.update)
        case functools.partial():
            options = [*map(inner, value.args), *(f"{k}={inner(v)}" for k, v in value.keywords.items())]
            return f"{inner(value.func)}({', '.join(options)})"
        case types.MethodType():
            return f"{inner(value.__self__)}.{value.__name__}"
        case types.FunctionType():
            return _function(value, inner)
        case _ if hasattr(value, "__wrapped__"):
            return inner(value.__wrapped__)
        case np.ndarray() | np.generic() | jax.Array():
            digits = np.asarray(value)
            return repr(digits.tolist()) if digits.size <= 16 else f"{digits.dtype}{list(digits.shape)}"
        case Mapping():
            return f"{{{', '.join(f'{key!r}: {inner(item)}' for key, item in value.items())}}}"
        case Sequence():
            return f"({', '.join(map(inner, value))})"
        case type() | types.BuiltinFunctionType():
            return value.__qualname__
        case _:
            return f"{type(value).__qualname__}({inner(vars(value)) if hasattr(value, '__dict__') else ''})"


def _function(function: types.FunctionType, inner: Callable[[Any], str]) -> str:
    """A function by its name, defaults, what it closes over, and the decimal numbers it is written with."""
    name = function.__qualname__.split(".<locals>")[0]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if _filled(cell)}
    defaults = [*(function.__kwdefaults__ or {}).values(), *(function.__defaults__ or ())]
    numbers = [constant for constant in function.__code__.co_consts if isinstance(constant, float)]
    options = [f"{key}={inner(item)}" for key, item in held.items()]
    options += [inner(default) for default in defaults if default is not None]
    return f"{name}({', '.join([*options, *map(repr, numbers)])})"


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # the variable has no value yet
        return False
