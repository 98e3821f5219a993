"""The guard against NaN and infinity: a sequence whose logits hold one ends with that step, and is told of.

Its batch mates go on: what is not finite never leaves a sequence, as attention reads no other's keys.
"""

import dataclasses
import warnings
from typing import Literal

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool

from dllm_jax.state import host
from dllm_jax.state.canvas import Canvas


class NonFiniteWarning(RuntimeWarning):
    """Sequences of a generation ended early, because their logits held NaN or infinity."""


NonFinite = Literal["warn", "raise", "ignore"]


def end(canvas: Canvas, finite: Bool[Array, "b"]) -> Canvas:
    """The canvas after a step, in which sequences that were not finite are done as they are.

    No sampler could finish their block before the end of its schedule.
    """
    return dataclasses.replace(canvas, done=canvas.done | ~finite)


def report(finite: Bool[host.AnyArray, "b"], how: NonFinite, stacklevel: int):
    """Tells which sequences ended for want of finite logits; waits for the generation unless `how` is ignore.

    Nothing is told inside of a traced program, whose values are not known.

    Args:
      finite: `Stats.finite`. All processes must call this if it is global.
      how: warn, raise, or say nothing.
      stacklevel: of the warning, as `warnings.warn` counts from here.

    Raises:
      FloatingPointError: there are such sequences, and `how` is to raise.

    Warns:
      NonFiniteWarning: there are such sequences, and `how` is to warn.
    """
    if how == "ignore" or isinstance(finite, Tracer):
        return
    ended = np.flatnonzero(~host.everywhere(finite)).tolist()
    if not ended:
        return
    message = (
        f"sequences {ended} of {finite.shape[0]} ended early: their logits held NaN or infinity, and what "
        "was not decoded before is still masked (stats.finite); load(..., check_finite=True) looks for such "
        "weights"
    )
    if how == "raise":
        raise FloatingPointError(message)
    warnings.warn(message, NonFiniteWarning, stacklevel=stacklevel + 1)
