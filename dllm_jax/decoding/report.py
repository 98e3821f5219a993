"""Warnings and errors about a finished generation: what was not finite, idled, or was not filled."""

import numpy as np
from jax.core import Tracer

from dllm_jax.engine.stats import NonFinite, NonFiniteWarning, Stats
from dllm_jax.options.base import users_own
from dllm_jax.options.hints import warn
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.state import host
from dllm_jax.state.inputs import IdleStepsWarning

COVER = (
    "Let `select` cover canvas.predicting_positions(canvas.block) in every step (docs/writing-a-policy.md)"
)


class UnfilledWarning(UserWarning):
    """A generation left masks: constraints, a policy or a sampler of the user's never unmasked them."""


class LengthWarning(UserWarning):
    """Answers of a generation reached their maximum length, and were to grow further."""


def report(stats: Stats, policy: Policy, sampler: Sampler, how: NonFinite):
    """Tells of a generation by its statistics; waits for it if there may be something to tell.

    Nothing is told inside of a traced program, whose values are not known.

    Args:
      stats: Statistics of the generation. All processes must call this if they are global.
      policy: Policy of the generation.
      sampler: Sampler of the generation.
      how: warn, raise, or say nothing of logits that are not finite.

    Raises:
      FloatingPointError: sequences ended for want of finite logits, and `how` is to raise.

    Warns:
      NonFiniteWarning: there are such sequences, and `how` is to warn.
      IdleStepsWarning: a sampler or a policy of the user's let steps run that had nothing to decode.
      UnfilledWarning: masks are left, by constraints without an allowed token, or by policy or sampler.
      LengthWarning: answers ended at their maximum length although they were to grow.
    """
    if isinstance(stats.finite, Tracer):
        return
    # The library's own classes leave none, so that nobody waits to see that.
    waits = how != "ignore" or any(_of_user(policy, sampler))
    if waits and stats.masked_tokens is not None and (masked := host.everywhere(stats.masked_tokens)).any():
        message = _masked(masked, stats, policy, sampler)
        warn(message, UnfilledWarning)
    elif stats.idle is not None and host.everywhere(stats.idle).any():
        warn(_idle(stats, policy, sampler), IdleStepsWarning)
    if stats.unfilled_tokens is not None and (unfilled := host.everywhere(stats.unfilled_tokens)).any():
        which = np.flatnonzero(unfilled).tolist()
        message = (
            f"constraints= allow a mask no token in sequences {which}, which end with {unfilled.sum()} masks "
            "(stats.unfilled_tokens). Allow each position a token once those are unmasked that it waits for"
        )
        warn(message, UnfilledWarning)
    if stats.wanted_more is not None and (more := host.everywhere(stats.wanted_more)).any():
        message = (
            f"answers of sequences {np.flatnonzero(more).tolist()} of {len(more)} were to grow beyond "
            "max_length (stats.wanted_more), and end there; what did not fit is lost. Pass a larger one"
        )
        warn(message, LengthWarning)
    if how == "ignore":
        return
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
    warn(message, NonFiniteWarning)


def _idle(stats: Stats, policy: Policy, sampler: Sampler) -> str:
    """Says that steps could unmask nothing, for want of masks or of what predicts them."""
    idle = host.everywhere(stats.idle)
    most = int(np.argmax(idle))
    passes = f"{idle[most]} of {host.everywhere(stats.nfe)[most]} forward passes of a sequence"
    if not sampler.may_idle:
        return (
            f"policy={type(policy).__name__}(..) idles: {passes} computed no position that predicts a mask "
            f"of the block, and could unmask nothing. {COVER}"
        )
    return (
        f"sampler={type(sampler).__name__}(..) idles: {passes} had no mask left to decode in its block, "
        "which waited for the steps of its schedule. Derive the sampler from dj.samplers.UntilDone "
        "(docs/writing-a-sampler.md), or pass fewer steps"
    )


def _of_user(policy: Policy, sampler: Sampler) -> tuple[bool, bool]:
    """Whether policy and sampler have methods of the user's by which masks may be left."""
    return (
        users_own(policy, "select", "eligible", "reads", "layer"),
        users_own(sampler, "transfer", "decide", "finished", "max_steps"),
    )


def _masked(masked: np.ndarray, stats: Stats, policy: Policy, sampler: Sampler) -> str:
    """Says how many masks are left, of which sequences, and which class leaves them."""
    names = f"policy={type(policy).__name__}(..)", f"sampler={type(sampler).__name__}(..)"
    missed = stats.idle is not None and not sampler.may_idle and bool(host.everywhere(stats.idle).any())
    of_policy, of_sampler = _of_user(policy, sampler)
    if missed or (of_policy and not of_sampler):
        most = int(np.argmax(masked))
        passes, idle = (0 if a is None else host.everywhere(a)[most] for a in (stats.nfe, stats.idle))
        unpredicted = f"{idle} of {passes} forward passes of a sequence predict none of them. {COVER}"
        who, why = names[0], unpredicted if missed else "its sets do not offer them to the sampler"
    elif of_sampler and not of_policy:
        who, why = names[1], "its `transfer` did not select them. Select at least one candidate in every step"
    else:
        who, why = " and ".join(names), "they were not computed, or not selected"
    return (
        f"{masked.sum()} masks of sequences {np.flatnonzero(masked).tolist()} of {len(masked)} are left at "
        f"the end (stats.masked_tokens), by {who}: {why}"
    )
