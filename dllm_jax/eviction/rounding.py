"""Rounds shares to whole numbers of a given sum: water-filling under a cap, then largest remainders."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Vector = Any  # np.ndarray or jax.Array; the result has the type of the argument


def conserve(target: Vector, total, cap) -> Vector:
    """Whole numbers close to the targets, none above `cap`, that add up to min(total, n * cap) exactly.

    Targets above the cap are cut and the others scaled up to what remains (water-filling); then everything
    is rounded down and the missing units go to the largest fractional parts, lowest index first.

    Args:
      target: shares [... n], not negative.
      total: their sum wanted, [... 1] or a number.
      cap: upper bound of each, [... 1] or a number.
    """
    xp = jnp if isinstance(target, jax.Array) else np
    n = target.shape[-1]
    target = xp.maximum(target, 1e-12)  # a share of nothing takes what is above the others' caps
    total = xp.minimum(total, n * cap)
    filled = xp.minimum(_water_fill(xp, target, total, cap), cap)
    whole = xp.floor(filled + (1e-9 if xp is np else 1e-5))
    missing = total - xp.sum(whole, axis=-1, keepdims=True)
    rest = xp.where(whole < cap, filled - whole, -xp.inf)
    rank = xp.argsort(xp.argsort(-rest, axis=-1, stable=True), axis=-1)
    return (whole + (rank < missing)).astype(xp.int32)


def _water_fill(xp, target, total, cap):
    """Scales the targets to `total` after setting the m largest to the cap, for the least possible m."""
    n = target.shape[-1]
    order = xp.argsort(-target, axis=-1, stable=True)
    descending = xp.take_along_axis(target, order, axis=-1)
    rest = xp.flip(xp.cumsum(xp.flip(descending, -1), axis=-1), -1)  # sum of all but the m largest
    scale = (total - xp.arange(n) * cap) / xp.maximum(rest, 1e-30)
    fits = descending * scale <= cap * (1 + 1e-6)
    full = xp.where(xp.any(fits, axis=-1), xp.argmax(fits, axis=-1), n)[..., None]
    factor = xp.take_along_axis(scale, xp.minimum(full, n - 1), axis=-1)
    rank = xp.argsort(order, axis=-1)
    return xp.where(rank < full, cap, target * factor)
