"""Comparison with a recorded trace: tokens and sets exactly, scores and logits to a tolerance."""

import re

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from tests.replay.case import Case

SCORE_TOLERANCE = 1e-4
BF16_MAX, BF16_MEAN = 0.5, 0.06


class Differs(Exception):
    """The replay departs from the recording; the message says where."""

    outcome = "differs"


class Skipped(Exception):
    """The case is not replayed; the message says why."""

    outcome = "skipped"


def exactly(name: str, ours, recorded, where=None):
    """Raises at the first step (leading axis) that differs, among the places `where` is True."""
    ours, recorded = np.asarray(ours), np.asarray(recorded)
    if ours.shape != recorded.shape:
        raise Differs(f"{name}: shape {ours.shape}, recorded {recorded.shape}")
    if (differs := (ours != recorded) & (True if where is None else where)).any():
        at = tuple(int(i) for i in np.argwhere(differs)[0])
        raise Differs(f"{name} differs at step {at[0]}, index {at[1:]}: {ours[at]}, recorded {recorded[at]}")


def closely(name: str, ours, recorded, where=None, tolerance: float = SCORE_TOLERANCE):
    """Raises if the largest absolute difference exceeds the tolerance."""
    ours, recorded = np.asarray(ours, np.float64), np.asarray(recorded, np.float64)
    if ours.shape != recorded.shape:
        raise Differs(f"{name}: shape {ours.shape}, recorded {recorded.shape}")
    where = np.broadcast_to(True if where is None else where, ours.shape)
    gap = np.abs(ours[where] - recorded[where])
    if gap.size and not gap.max() <= tolerance:  # also catches NaN
        raise Differs(f"{name} differs by {gap.max():.2e} > {tolerance:.0e}")
    return gap


def bf16_closely(name: str, ours, recorded, where=None):
    """Looser comparison for bfloat16 arithmetic: two kernels of one library already differ by 0.3."""
    mean = closely(name, ours, recorded, where, tolerance=BF16_MAX).mean()
    if not mean <= BF16_MEAN:
        raise Differs(f"{name} differs by {mean:.3f} in the mean > {BF16_MEAN}")


def compare_steps(case: Case, trace, predicted: str, computed: str | None = None, useful=slice(None)):
    """Tokens after every step, sets, candidate tokens and confidences, where both sides have them."""
    arrays, confidence = case.arrays, case.arrays["confidence"][useful]
    recorded = np.concatenate([arrays["tokens"][:1], arrays["tokens"][1:][useful]])
    trace = in_recorded_steps(trace, recorded)
    exactly("tokens", trace.tokens, recorded)
    if "active_rows" in arrays:
        exactly("active sequences", trace.active, arrays["active_rows"][useful])
    if computed:
        active = np.asarray(trace.active)[..., None]
        exactly(computed, trace.computed, arrays[computed][useful], where=active)
    width = confidence.shape[-1]  # the full canvas, or the response alone
    score = np.asarray(trace.score)[..., -width:]
    # Where the reference's candidate is [MASK], ours is the best other token.
    eligible = np.isfinite(score) & np.isfinite(confidence)
    if not case.restores_oddities:
        eligible &= arrays[predicted][useful] != case.mask_id
    closely("confidence", score, confidence, where=eligible)
    proposed = np.asarray(trace.proposed)[..., -width:]
    exactly("candidates", proposed, arrays[predicted][useful], where=eligible)
    if not eligible.any():
        raise AssertionError("nothing was compared: no position is eligible in both traces")


def in_recorded_steps(trace, tokens: np.ndarray):
    """The trace by the steps of the recording, where a sequence may wait for its batch mates.

    Ours wait for none. A sequence of as many steps as were recorded has taken all; one of fewer took those
    that changed its recorded tokens, and what it did in them is compared there.
    """
    trace, steps = type(trace)(*map(np.asarray, trace)), len(tokens) - 1
    changed, batch = (tokens[1:] != tokens[:-1]).any(axis=-1), np.arange(tokens.shape[1])
    own = trace.active.sum(axis=0)
    if (own == steps).all():
        return trace
    took = np.where(own == steps, True, changed)
    exactly("numbers of steps", took.sum(axis=0), own)

    # Before its own step i a sequence has taken i of the recorded ones; while it waits its tokens stay.
    before = np.concatenate([np.zeros((1, len(own)), int), np.cumsum(took, axis=0)])
    at = np.minimum(before[:-1], len(trace.active) - 1)
    of_steps = {name: getattr(trace, name)[at, batch] for name in ("computed", "proposed", "score")}
    return trace._replace(tokens=trace.tokens[before, batch], active=took, **of_steps)


def compare_logits(case: Case, model: dj.Model, shifted: bool = False):
    """Stored logits of uncached steps, recomputed from the recorded state before that step."""
    arrays, pads = case.arrays, case.prompt_mask
    stored = {int(k[11:]): v for k, v in arrays.items() if re.fullmatch("logits_step[0-9]+", k)}
    if "logits_steps" in arrays:
        stored = dict(zip(arrays["logits_steps"].tolist(), arrays["logits"], strict=True))
    for step, logits in stored.items():
        tokens = arrays["tokens"][step]
        valid = np.ones(tokens.shape, bool)
        if pads is not None:
            valid[:, : pads.shape[1]] = pads
        rows = np.ones(len(tokens), bool) if "active_rows" not in arrays else arrays["active_rows"][step]
        ours = np.asarray(dj.forward(model, jnp.asarray(tokens), jnp.asarray(valid)))[rows]
        real = valid[rows]
        if shifted:  # neither padding, nor read from it
            before = lambda a: np.concatenate([a[:, :1], a[:, :-1]], axis=1)
            ours, real = before(ours), real & before(real)
        closely(f"logits of step {step}", ours, logits, where=real[..., None])
