"""Rounds budgets to whole numbers of a given sum: water-filling under a cap, then largest remainders."""

import fractions
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Vector = Any  # np.ndarray (of Fractions, or floats taken at their exact value) or jax.Array


def exactly(values: Any) -> np.ndarray:
    """An array of Fractions with the exact values of numbers, so that equal budgets compare as equal."""
    array = np.asarray(values, object)
    return np.vectorize(fractions.Fraction, otypes=[object])(array)


def round_to_total(target: Vector, total, cap) -> Vector:
    """Whole numbers close to the targets, none above `cap`, that add up to min(total, n * cap) exactly.

    Targets above the cap are cut and the others scaled up to what remains (water-filling); then everything
    is rounded down and the missing units go to the largest fractional parts, ties to the lower index. On the
    host this is rational arithmetic, so ties are ties; on the device it is float32.

    Args:
      target: budgets [... n], not negative.
      total: their sum wanted, [... 1] or a number.
      cap: upper bound of each, [... 1] or a number.

    Returns:
      int32 [... n].
    """
    # float32 sums miss whole numbers by rounding errors: `slack` is added before rounding down.
    on_device = isinstance(target, jax.Array)
    xp = jnp if on_device else np
    target = target if on_device else exactly(target)
    smallest: Any
    smallest, slack = (1e-12, 1e-5) if on_device else (fractions.Fraction(1, 10**12), 0)
    n = target.shape[-1]

    # A target of 0 becomes tiny instead: it gets nothing unless the others are all at the cap.
    target = xp.maximum(target, smallest)
    total = xp.minimum(total, n * cap)
    filled = xp.minimum(_water_fill(xp, target, total, cap), cap)

    # Largest remainders: what rounding down leaves goes to the largest fractional parts below the cap.
    floor = xp.floor(filled + slack)
    remainder = xp.where(floor < cap, filled - floor, -1)
    missing = total - xp.sum(floor, axis=-1, keepdims=True)
    rank = xp.sum(_ahead(xp, remainder), axis=-1)
    return (floor + (rank < missing)).astype(xp.int32)


def _ahead(xp, values):
    """Pairs [... i j] of entries in which the j-th is larger, or equal and before the i-th."""
    mine, other, index = values[..., :, None], values[..., None, :], xp.arange(values.shape[-1])
    return (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))


def _water_fill(xp, target, total, cap):
    """Scales the targets to `total` after setting the m largest to the cap, for the least possible m."""
    # Of each entry its rank m, and the sum of all but the m entries ahead of it. A sort would be several
    # kernels, for few numbers.
    n, ahead = target.shape[-1], _ahead(xp, target)
    # Ranks are whole numbers: floats came out wrong over a mesh where XLA compiled with few optimisations.
    rank = xp.sum(ahead, axis=-1)
    rest = xp.sum(xp.where(ahead, 0, target[..., None, :]), axis=-1)

    # With the m largest at the cap, the others are scaled by scale[m]; it fits if the largest stays below.
    scale = (total - rank * cap) / rest
    fits = target * scale <= (cap * (1 + 1e-6) if xp is jnp else cap)
    at_cap = xp.min(xp.where(fits, rank, n), axis=-1, keepdims=True)
    factor = xp.sum(xp.where(rank == xp.minimum(at_cap, n - 1), scale, 0), axis=-1, keepdims=True)
    return xp.where(rank < at_cap, cap, target * factor)
