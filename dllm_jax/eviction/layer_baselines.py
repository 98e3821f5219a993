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
      outside: leave the window out of the pyramid (the older public code, whole-number arithmetic) instead
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
        """A linear descent whose rounding, half to even, is the method's own."""
        # A budget that holds the prompt evicts nothing; the other two cases no released code covers.
        if budget >= prompt or layers == 1 or budget <= self.window:
            return np.full(layers, min(budget, prompt), np.int32)
        depth = np.arange(layers)

        # The older public code: the window is added to each layer of a pyramid over the other pairs.
        if self.outside:
            if prompt < 2 * (budget - self.window):
                return np.full(layers, budget, np.int32)
            average = budget - self.window
            largest, smallest = self._ends(average, average // self.beta, prompt - self.window)
            budgets = largest - depth * ((largest - smallest) // layers) + self.window
            return np.clip(budgets, 0, prompt).astype(np.int32)

        # kvpress: the window is part of the pyramid; uniform where the last layer could not hold it.
        largest, smallest = self._ends(budget, budget / self.beta, prompt - self.window)
        if not prompt >= largest >= smallest >= self.window:
            return np.full(layers, budget, np.int32)
        return np.round(largest - depth * (largest - smallest) / max(layers - 1, 1)).astype(np.int32)

    def _ends(self, average: int, smallest: float, limit: int) -> tuple[float, float]:
        """Budgets of the first and the last layer around the average, the first at most `limit`."""
        largest = 2 * average - smallest
        return (limit, 2 * average - limit) if largest >= limit else (largest, smallest)


@dataclasses.dataclass(frozen=True)
class SqueezeAttention(LayerBudgets):
    """SqueezeAttention (arXiv:2404.04793): layers that change their input least give up part of their budget.

    Attributes:
      cosine: similarity of the residual stream before and after each layer's attention, averaged over
        prompt tokens (1 - `eviction.importance`).
      share: fraction of the uniform budget that the group of the most similar layers retains (the paper's
        p).
    """

    cosine: Profile
    share: Fraction = 0.4

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        check_depth("cosine", self.cosine, layers)
        return round_to_total(self.allocate(budget), layers * budget, prompt)

    def allocate(self, budget: int) -> Vector:
        """The budget of each layer before rounding, as Fractions, so that ties are ties."""
        # The retention ratio counts as the decimal that the user wrote: 0.4 is 2/5, not the nearest double.
        similar = self.groups() == 2
        reduced = exactly(str(self.share)) * budget

        # The other layers get, evenly, what the most similar ones give up.
        remaining = len(similar) * budget - int(similar.sum()) * reduced
        return np.where(similar, reduced, remaining / max(int((~similar).sum()), 1))

    def groups(self) -> Int[np.ndarray, "n"]:
        """The exact 3-means of the cosines, 2 = most similar; a single group 0 below three layers."""
        # In one dimension clusters are contiguous in sorted order, so all pairs of cuts can be tried.
        order = np.argsort(self.cosine, kind="stable")
        ordered = np.asarray(self.cosine, np.float64)[order]
        n = len(ordered)
        if n < 3:
            return np.zeros(n, np.int32)
        spread = lambda a: float(np.sum((a - a.mean()) ** 2))
        cost = lambda i, j: spread(ordered[:i]) + spread(ordered[i:j]) + spread(ordered[j:])
        i, j = min(((i, j) for i in range(1, n - 1) for j in range(i + 1, n)), key=lambda cut: cost(*cut))

        # Back to the layers' own order.
        label = np.empty(n, np.int32)
        label[order] = (np.arange(n) >= i).astype(np.int32) + (np.arange(n) >= j)
        return label
