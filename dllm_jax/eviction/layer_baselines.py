"""Layer budgets of other methods, for comparison."""

import dataclasses

import numpy as np
from jaxtyping import Int
from typing_extensions import override

from dllm_jax.eviction.layer_budgets import LayerBudgets, check_depth
from dllm_jax.eviction.rounding import Vector, exactly, round_to_total
from dllm_jax.options import Fraction, PositiveInt, Profile


@dataclasses.dataclass(frozen=True)
class PyramidKV(LayerBudgets):
    """PyramidKV (arXiv:2406.02069): a linear descent from the first layer to the last.

    Attributes:
      beta: steepness; the last layer gets budget / beta.
      window: pairs of the observation window, which count towards the budget.
      outside: keep the window outside the pyramid (the older public code, whole-number arithmetic) instead
        of falling back to a uniform budget when the last layer could not hold it (kvpress); with the default
        beta and window the latter happens below 640 pairs. Steps between layers are rounded down, so that
        `outside` keeps somewhat more than the budget.

    With a single layer, or a budget that the window uses up, budgets are uniform: neither code covers these.
    """

    beta: PositiveInt = 20
    window: PositiveInt = 32
    outside: bool = False

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        """See `LayerBudgets.budgets`; the rounding is the method's own, half to even."""
        if budget >= prompt or layers == 1 or budget <= self.window:
            return np.full(layers, min(budget, prompt), np.int32)
        depth = np.arange(layers)
        if self.outside:
            if prompt < 2 * (budget - self.window):
                return np.full(layers, budget, np.int32)
            most, least = self._ends(budget - self.window, prompt - self.window, whole=True)
            kept = most - depth * ((most - least) // layers) + self.window
            return np.clip(kept, 0, prompt).astype(np.int32)
        most, least = self._ends(budget, prompt - self.window, whole=False)
        if not prompt >= most >= least >= self.window:
            return np.full(layers, budget, np.int32)
        return np.round(most - depth * (most - least) / max(layers - 1, 1)).astype(np.int32)

    def _ends(self, average: int, limit: int, whole: bool) -> tuple[float | int, float | int]:
        least = average // self.beta if whole else average / self.beta
        most = 2 * average - least
        return (limit, 2 * average - limit) if most >= limit else (most, least)


@dataclasses.dataclass(frozen=True)
class SqueezeAttention(LayerBudgets):
    """SqueezeAttention (arXiv:2404.04793): layers that change their input least give up part of their budget.

    Attributes:
      cosine: similarity of the residual stream before and after each layer's attention, averaged over
        prompt tokens (1 - `eviction.importance`).
      share: fraction of the uniform budget left to the group of the most similar layers.
    """

    cosine: Profile
    share: Fraction = 0.4

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        check_depth("cosine", self.cosine, layers)
        return round_to_total(self.allocate(budget), layers * budget, prompt)

    def allocate(self, budget: int) -> Vector:
        """The budget of each layer before rounding, as Fractions: shares of 0.4 and such tie as written."""
        idle = self.groups() == 2
        left = exactly(str(self.share)) * budget
        taken = int(idle.sum()) * left
        others = (len(idle) * budget - taken) / max(int((~idle).sum()), 1)
        return np.where(idle, left, others)

    def groups(self) -> Int[np.ndarray, "n"]:
        """The exact 3-means of the cosines (best contiguous split in order), 2 = most similar."""
        order = np.argsort(self.cosine, kind="stable")
        ordered = np.asarray(self.cosine, np.float64)[order]
        n = len(ordered)
        if n < 3:
            return np.zeros(n, np.int32)
        spread = lambda a: float(np.sum((a - a.mean()) ** 2))
        cost = lambda i, j: spread(ordered[:i]) + spread(ordered[i:j]) + spread(ordered[j:])
        i, j = min(((i, j) for i in range(1, n - 1) for j in range(i + 1, n)), key=lambda cut: cost(*cut))
        label = np.empty(n, np.int32)
        label[order] = (np.arange(n) >= i).astype(np.int32) + (np.arange(n) >= j)
        return label
