"""The configuration of a run in words, by which a resumed run is compared with the one it goes on from."""

import dataclasses
import hashlib
import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument, shown
from dllm_jax.training.setup import Setup
from dllm_jax.training.trainable import Trainable, labels, parameters

Record = dict[str, Any]

# Options that change no step that was done, but for rounding. "steps" and "decay" are compared by the rates
# that they gave.
FREE = ("steps", "decay", "save_every", "accumulate", "remat")


def record_of(model: Model, setup: Setup, trainable: Trainable | None, replaced: bool) -> Record:
    """The configuration as JSON: options, optimizer, what is trained, and the model.

    Args:
      model: to be trained.
      setup: of the run.
      trainable: as `prepare` got it.
      replaced: whether the optimizer is another one than the config describes.
    """
    params = parameters(model)
    trained, frozen = setup.split(params)
    paths = jax.tree_util.tree_leaves_with_path(labels(params, trainable))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): label for path, label in paths}
    spec = {f"spec.{name}": value for name, value in dataclasses.asdict(setup.spec).items()}
    record = dataclasses.asdict(setup.config) | {
        "warmup": setup.config.warmup_steps,
        "blocks": None if setup.config.blocks is None else list(setup.config.blocks),
        "optimizer": _digest(setup, trained) if replaced else None,
        "trainable": None if all(label is True for label in named.values()) else named,
        "dtype": "/".join(sorted({str(dtype) for dtype in setup.dtypes})),
        "frozen": int(checksum(frozen)),  # which checkpoints do not hold
    }
    return record | spec


def check_unchanged(old: Record, new: Record, step: int, allowed: Collection[str]):
    """Compares the configuration of a checkpoint with the one that goes on from it.

    Args:
      old: of the checkpoint.
      new: of the run.
      step: optimiser steps done.
      allowed: names that may differ.

    Raises:
      ValueError: what differs, with both values.
    """
    # What cannot have changed a step that was done is free; the schedule is compared by the rates it gave.
    changed = [name for name in new if old.get(name) != new[name] and name not in FREE]
    if any(record["steps"] - record["decay"] < step for record in (old, new)):
        changed += [name for name in ("steps", "decay") if old.get(name) != new[name]]
    changed = [name for name in changed if name not in allowed]
    if changed:
        lines = "; ".join(_difference(name, old.get(name), new[name]) for name in changed)
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


def _difference(name: str, old: Any, new: Any) -> str:
    """Both values; of mappings the first entry that differs."""
    if isinstance(old, dict) or isinstance(new, dict):
        before, now = (value if isinstance(value, dict) else {} for value in (old, new))
        key = next(key for key in (*before, *now) if before.get(key) != now.get(key))
        return _difference(f"{name}[{key!r}]", before.get(key), now.get(key))
    return f"{name}={old!r} then, {new!r} now"


@jax.jit
def checksum(arrays: PyTree[Array]) -> Array:
    """The sum of the arrays' bits as whole numbers, modulo 2**32: the same on every mesh."""
    bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * min(a.dtype.itemsize, 4)}"))
    sums = (jnp.sum(bits(array).astype(jnp.uint32), dtype=jnp.uint32) for array in jax.tree.leaves(arrays))
    return sum(sums, start=jnp.uint32(0))


def _digest(setup: Setup, trained: PyTree[Array]) -> str:
    """SHA-256 of what the setup's transformation computes: the programs of its `init` and `update`.

    Transformations of optax are closures, without a name or options to ask for; but every number that they
    hold is in their programs. Other versions of JAX may write the same program in other words.
    """
    optimizer = optax.with_extra_args_support(setup.optimizer)
    params = jax.eval_shape(setup.masters, trained)
    total = lambda params: sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(params))
    update = lambda grad, state, params: optimizer.update(
        grad, state, params, value=jnp.float32(0), grad=grad, value_fn=total
    )
    state = jax.eval_shape(optimizer.init, params)
    programs = jax.make_jaxpr(optimizer.init)(params), jax.make_jaxpr(update)(params, state, params)
    digest = hashlib.sha256()
    for program in programs:
        digest.update(re.sub(" at 0x[0-9a-f]+", "", str(program.jaxpr)).encode())
        # Arrays that a program closes over are arguments in its text.
        for constant in program.consts:
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()
