"""The guard against NaN and infinity: a sequence whose logits hold one ends with that step, and is told of.

Its other sequences go on: what is not finite never leaves a sequence, as attention reads no other's keys.
"""

import dataclasses
from typing import Literal

from jaxtyping import Array, Bool

from dllm_jax.state.canvas import Canvas


class NonFiniteWarning(RuntimeWarning):
    """Sequences of a generation ended early, because their logits held NaN or infinity."""


NonFinite = Literal["warn", "raise", "ignore"]


def end(canvas: Canvas, finite: Bool[Array, "b"]) -> Canvas:
    """The canvas after a step, in which sequences that were not finite are done as they are.

    No sampler could finish their block before the end of its schedule.
    """
    return dataclasses.replace(canvas, done=canvas.done | ~finite)
