"""Warnings and errors about a finished generation: what was not finite, idled, or was not filled."""

import warnings

import numpy as np
from jax.core import Tracer

from dllm_jax.engine.nonfinite import NonFinite, NonFiniteWarning
from dllm_jax.engine.stats import Stats
from dllm_jax.samplers.base import Sampler
from dllm_jax.state import host
from dllm_jax.state.inputs import IdleStepsWarning


class UnfilledWarning(UserWarning):
    """Constraints left masks of a generation without an allowed token."""


class LengthWarning(UserWarning):
    """Answers of a generation reached their maximum length, and were to grow further."""


def report(stats: Stats, sampler: Sampler, how: NonFinite, stacklevel: int):
    """Tells of a generation by its statistics; waits for it unless `how` is ignore.

    Nothing is told inside of a traced program, whose values are not known.

    Args:
      stats: Statistics of the generation. All processes must call this if they are global.
      sampler: Sampler of the generation.
      how: warn, raise, or say nothing.
      stacklevel: Stack level of a warning, as `warnings.warn` counts from here.

    Raises:
      FloatingPointError: sequences ended for want of finite logits, and `how` is to raise.

    Warns:
      NonFiniteWarning: there are such sequences, and `how` is to warn.
      IdleStepsWarning: a sampler of the user's let steps run that had nothing to decode.
      UnfilledWarning: constraints left masks without an allowed token.
      LengthWarning: answers ended at their maximum length although they were to grow.
    """
    if how == "ignore" or isinstance(stats.finite, Tracer):
        return
    if stats.idle is not None and (idle := host.everywhere(stats.idle)).any():
        most = int(np.argmax(idle))
        message = (
            f"sampler={type(sampler).__name__}(..) idles: {idle[most]} of "
            f"{host.everywhere(stats.nfe)[most]} forward passes of a sequence had no mask left to decode in "
            "its block, which waited for the steps of its schedule. Derive the sampler from "
            "dj.samplers.UntilDone (docs/writing-a-sampler.md), or pass fewer steps"
        )
        warnings.warn(message, IdleStepsWarning, stacklevel=stacklevel + 1)
    if stats.unfilled_tokens is not None and (unfilled := host.everywhere(stats.unfilled_tokens)).any():
        message = (
            f"constraints= allow no token to {unfilled.sum()} masks of sequences "
            f"{np.flatnonzero(unfilled).tolist()}, which are still masked (stats.unfilled_tokens). Allow "
            "each position a token once those are unmasked that it waits for"
        )
        warnings.warn(message, UnfilledWarning, stacklevel=stacklevel + 1)
    if stats.wanted_more is not None and (more := host.everywhere(stats.wanted_more)).any():
        message = (
            f"answers of sequences {np.flatnonzero(more).tolist()} of {len(more)} were to grow beyond "
            "max_length (stats.wanted_more), and end there; what did not fit is lost. Pass a larger one"
        )
        warnings.warn(message, LengthWarning, stacklevel=stacklevel + 1)
    ended = np.flatnonzero(~host.everywhere(stats.finite)).tolist()
    if not ended:
        return
    message = (
        f"sequences {ended} of {stats.finite.shape[0]} ended early: their logits held NaN or infinity, and "
        "what was not decoded before is still masked (stats.finite); load(..., check_finite=True) looks for "
        "such weights"
    )
    if how == "raise":
        raise FloatingPointError(message)
    warnings.warn(message, NonFiniteWarning, stacklevel=stacklevel + 1)
