"""Budgets of heads: how a layer's KV pairs are divided among its KV heads."""

import abc
import dataclasses
import fractions
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from dllm_jax.options import Fraction, Options, TracedFraction
from dllm_jax.state import selection

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
    # Ranks are whole numbers: floats came out wrong over a mesh where XLA compiled with few optimizations.
    rank = xp.sum(ahead, axis=-1)
    rest = xp.sum(xp.where(ahead, 0, target[..., None, :]), axis=-1)

    # With the m largest at the cap, the others are scaled by scale[m]; it fits if the largest stays below.
    scale = (total - rank * cap) / rest
    fits = target * scale <= (cap * (1 + 1e-6) if xp is jnp else cap)
    at_cap = xp.min(xp.where(fits, rank, n), axis=-1, keepdims=True)
    factor = xp.sum(xp.where(rank == xp.minimum(at_cap, n - 1), scale, 0), axis=-1, keepdims=True)
    return xp.where(rank < at_cap, cap, target * factor)


# -- how many prompt pairs each KV head of a layer keeps -------------------------------------------


class Evidence(NamedTuple):
    """Attention statistics of the prompt in one step.

    Attributes:
      votes: score of each prompt position by the attention it received (`Voters.score`), -inf at padding.
      preference: P_h (equation 14), the masked queries' attention to the prompt over that to prompt and
        masks, by KV head.
    """

    votes: Float[Array, "b k p"]
    preference: Float[Array, "b k"]


@dataclasses.dataclass(frozen=True)
class HeadBudgets(Options, abc.ABC):
    """How a layer's budget is spread over its KV heads."""

    @abc.abstractmethod
    def budgets(self, seen: Evidence, budget: Int[Array, "b"], prompt: Int[Array, "b"]) -> Int[Array, "b k"]:
        """Pairs that each KV head keeps, k * budget in all: those with most votes (MaskKV, equation 16).

        Args:
          seen: votes and preferences, see `eviction.evidence`.
          budget: pairs per head, on average; at most `prompt`.
          prompt: prompt length of each sequence, on block-causal models of its whole blocks.
        """

    def widest(self, budget: int, heads: int, prompt: int) -> int:
        """Upper bound of the pairs that one KV head keeps: those of all heads; static, for sizes of arrays.

        Args:
          budget: upper bound of the layer's pairs per head, on average.
          heads: KV heads.
          prompt: prompt positions.
        """
        # One of them may win every comparison, or be the only one that looks at the prompt.
        return min(budget * heads, prompt)


@dataclasses.dataclass(frozen=True)
class EvenHeads(HeadBudgets):
    """The same number for every KV head."""

    @override
    def budgets(self, seen: Evidence, budget: Int[Array, "b"], prompt: Int[Array, "b"]) -> Int[Array, "b k"]:
        return jnp.broadcast_to(budget[:, None], seen.preference.shape)

    @override
    def widest(self, budget: int, heads: int, prompt: int) -> int:
        return min(budget, prompt)


@dataclasses.dataclass(frozen=True)
class PromptPreference(HeadBudgets):
    """MaskKV, equations 14-15: heads that look more at the prompt keep more of it.

    Attributes:
      alpha: fraction of the layer's budget that is spread evenly.
    """

    alpha: TracedFraction = 0.1

    @override
    def budgets(self, seen: Evidence, budget: Int[Array, "b"], prompt: Int[Array, "b"]) -> Int[Array, "b k"]:
        # Equation 15, rounded so that the layer's budget is used up.
        total = seen.preference.shape[1] * budget[:, None]
        return round_to_total(self.allocate(seen.preference, budget), total, prompt[:, None])

    def allocate(self, preference: Float[Array, "b k"], budget: Int[Array, "b"]) -> Float[Array, "b k"]:
        """The budget of each KV head before rounding (equation 15).

        It is alpha k_l + (1 - alpha) H k_l P_h / sum P, with H KV heads.

        Args:
          preference: P_h of each head.
          budget: k_l, pairs per head on average.
        """
        # No head looks at a prompt that is all padding: the budget is then 0 too.
        total = jnp.maximum(jnp.sum(preference, axis=1, keepdims=True), 1e-30)

        # The relative preference H P_h / sum P is 1 for the average head. Written as a deviation from it, so
        # that alpha = 1 gives exactly the even budget.
        relative = preference.shape[1] * preference / total
        return budget[:, None] * (relative + self.alpha * (1 - relative))


@dataclasses.dataclass(frozen=True)
class AdaKV(HeadBudgets):
    """Ada-KV (arXiv:2407.11550): the heads of a layer compete for its budget by their votes.

    Attributes:
      floor: fraction of the budget that every head is guaranteed.
    """

    floor: Fraction = 0.2

    @override
    def budgets(self, seen: Evidence, budget: Int[Array, "b"], prompt: Int[Array, "b"]) -> Int[Array, "b k"]:
        # Every head's best int(floor * budget) positions are protected from the competition.
        votes = seen.votes
        b, heads, width = votes.shape
        guaranteed = selection.fraction_of(budget, self.floor, width)
        lines = votes.reshape(b * heads, width)
        protected = selection.best(lines, jnp.repeat(guaranteed, heads)).reshape(votes.shape)

        # The rest goes to the largest votes of any head, compared across the layer; what a head wins are its
        # own largest.
        flat = jnp.where(protected, jnp.inf, votes).reshape(b, heads * width)
        won = selection.best(flat, heads * budget).reshape(votes.shape)
        return jnp.sum(won, axis=-1)
