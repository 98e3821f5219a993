"""Comparison with a recorded trace: tokens and sets exactly, scores and logits to a tolerance."""

import numpy as np

SCORE_TOLERANCE = 1e-4
BF16_MAX, BF16_MEAN = 0.5, 0.06


class Differs(Exception):
    """The replay departs from the recording; the message says where."""


class Skipped(Exception):
    """The case is not replayed; the message says why."""


def exactly(name: str, ours, recorded, where=None):
    """Raises at the first step (leading axis) that differs, among the places `where` is True."""
    ours, recorded = np.asarray(ours), np.asarray(recorded)
    if ours.shape != recorded.shape:
        raise Differs(f"{name}: shape {ours.shape}, recorded {recorded.shape}")
    differs = ours != recorded
    if where is not None:
        differs &= where
    if differs.any():
        at = tuple(int(i) for i in np.argwhere(differs)[0])
        raise Differs(f"{name} differs at step {at[0]}, index {at[1:]}: {ours[at]}, recorded {recorded[at]}")


def closely(name: str, ours, recorded, where=None, tolerance: float = SCORE_TOLERANCE):
    """Raises if the largest absolute difference exceeds the tolerance."""
    ours, recorded = np.asarray(ours, np.float64), np.asarray(recorded, np.float64)
    if ours.shape != recorded.shape:
        raise Differs(f"{name}: shape {ours.shape}, recorded {recorded.shape}")
    gap = _gap(ours, recorded, where)
    if gap.size and not gap.max() <= tolerance:  # also catches NaN
        raise Differs(f"{name} differs by {gap.max():.2e} > {tolerance:.0e}")


def bf16_closely(name: str, ours, recorded, where=None):
    """Looser comparison for bfloat16 arithmetic: two kernels of one library already differ by 0.3."""
    closely(name, ours, recorded, where, tolerance=BF16_MAX)
    gap = _gap(np.asarray(ours, np.float64), np.asarray(recorded, np.float64), where)
    if not gap.mean() <= BF16_MEAN:
        raise Differs(f"{name} differs by {gap.mean():.3f} in the mean > {BF16_MEAN}")


def _gap(ours: np.ndarray, recorded: np.ndarray, where) -> np.ndarray:
    if where is None:
        return np.abs(ours - recorded)
    where = np.broadcast_to(where, ours.shape)
    return np.abs(ours[where] - recorded[where])
