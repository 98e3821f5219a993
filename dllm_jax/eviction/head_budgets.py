"""How many prompt pairs each KV head of a layer keeps, given the votes and the layer's budget."""

import abc
import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from dllm_jax.eviction.rounding import round_to_total
from dllm_jax.options import Fraction, Options, TracedFraction
from dllm_jax.state import selection


class Evidence(NamedTuple):
    """Attention statistics of the prompt in one step.

    Attributes:
      votes: attention that each prompt position received, -inf at padding.
      preference: P_h, the fraction of its attention that each KV head gives to the prompt.
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
          prompt: prompt length of each sequence.
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
