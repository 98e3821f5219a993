"""Which prompt pairs each kv head of a layer keeps, given the votes and the layer's budget."""

import abc
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.eviction.rounding import round_to_total
from dllm_jax.options import Fraction, Options
from dllm_jax.state import selection


def top(votes: Float[Array, "*b p"], count: Int[Array, "*b"]) -> Bool[Array, "*b p"]:
    """The `count` positions with most votes, ties to the lower position."""
    return selection.ranks(votes) < count[..., None]


@dataclasses.dataclass(frozen=True)
class HeadBudgets(Options, abc.ABC):
    """How a layer's budget is spread over its kv heads."""

    @abc.abstractmethod
    def keep(
        self,
        votes: Float[Array, "b k p"],
        preference: Float[Array, "b k"],
        budget: Int[Array, "b"],
        prompt: Int[Array, "b"],
    ) -> Bool[Array, "b k p"]:
        """The kept positions, k * budget in all.

        Args:
          votes: what each position received, -inf at padding.
          preference: how much each head looks at the prompt, see `eviction.evidence`.
          budget: pairs per head, on average; at most `prompt`.
          prompt: prompt length of each sequence.
        """

    @abc.abstractmethod
    def widest(self, budget: int, heads: int, prompt: int) -> int:
        """Upper bound of what one head may keep."""


@dataclasses.dataclass(frozen=True)
class EvenHeads(HeadBudgets):
    """The same number for every kv head."""

    @override
    def keep(
        self,
        votes: Float[Array, "b k p"],
        preference: Float[Array, "b k"],
        budget: Int[Array, "b"],
        prompt: Int[Array, "b"],
    ) -> Bool[Array, "b k p"]:
        return top(votes, jnp.broadcast_to(budget[:, None], votes.shape[:2]))

    @override
    def widest(self, budget: int, heads: int, prompt: int) -> int:
        return min(budget, prompt)


@dataclasses.dataclass(frozen=True)
class PromptPreference(HeadBudgets):
    """MaskKV, equations 14-15: heads that look more at the prompt keep more of it.

    Attributes:
      alpha: fraction of the layer's budget that is spread evenly.
    """

    alpha: Fraction = 0.1

    def budgets(
        self, preference: Float[Array, "b k"], budget: Int[Array, "b"], prompt: Int[Array, "b"]
    ) -> Int[Array, "b k"]:
        """Pairs of each head."""
        return round_to_total(
            self.allocate(preference, budget), preference.shape[1] * budget[:, None], prompt[:, None]
        )

    def allocate(self, preference: Float[Array, "b k"], budget: Int[Array, "b"]) -> Float[Array, "b k"]:
        """The budget of each head before rounding (equation 15)."""
        total = jnp.maximum(jnp.sum(preference, axis=1, keepdims=True), 1e-30)
        relative = preference.shape[1] * preference / total  # 1 is the average head
        return budget[:, None] * (relative + self.alpha * (1 - relative))

    @override
    def keep(
        self,
        votes: Float[Array, "b k p"],
        preference: Float[Array, "b k"],
        budget: Int[Array, "b"],
        prompt: Int[Array, "b"],
    ) -> Bool[Array, "b k p"]:
        return top(votes, self.budgets(preference, budget, prompt))

    @override
    def widest(self, budget: int, heads: int, prompt: int) -> int:
        """All heads' pairs, if only one head looks at the prompt."""
        return min(budget * heads, prompt)


@dataclasses.dataclass(frozen=True)
class AdaKV(HeadBudgets):
    """Ada-KV (arXiv:2407.11550): the heads of a layer compete for its budget by their votes.

    Attributes:
      floor: fraction of the budget that every head is guaranteed.
    """

    floor: Fraction = 0.2

    @override
    def keep(
        self,
        votes: Float[Array, "b k p"],
        preference: Float[Array, "b k"],
        budget: Int[Array, "b"],
        prompt: Int[Array, "b"],
    ) -> Bool[Array, "b k p"]:
        b, heads, width = votes.shape
        sure = selection.fraction_of(budget, self.floor, width)
        safe = top(votes, jnp.broadcast_to(sure[:, None], (b, heads)))
        flat = jnp.where(safe, jnp.inf, votes).reshape(b, heads * width)
        return top(flat, heads * budget).reshape(votes.shape)

    @override
    def widest(self, budget: int, heads: int, prompt: int) -> int:
        """All heads' pairs, if one head wins every comparison."""
        return min(budget * heads, prompt)
