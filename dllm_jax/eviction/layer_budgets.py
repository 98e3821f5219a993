"""How many prompt pairs each layer keeps per KV head, as far as known before the run."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, ClassVar

import numpy as np
from jaxtyping import Array, Float, Int
from typing_extensions import override

from dllm_jax.eviction.rounding import Vector, exactly, round_to_total
from dllm_jax.options import Fraction, NoneMeans, NonNegativeInt, Options, Profile
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class LayerBudgets(Options, abc.ABC):
    """How the budget of prompt pairs is spread over layers."""

    online: ClassVar[bool] = False
    """Whether budgets depend on the request, which costs a forward pass before its first step."""

    def check(self):
        """Refuses fields that have no effect; `MaskKV` calls it, since other owners may fill them in.

        Raises:
          ValueError: such a field is set.
        """

    @abc.abstractmethod
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        """Pairs per KV head of each layer: at most `prompt` each, n * min(budget, prompt) in all.

        Args:
          layers: n.
          budget: average over the layers.
          prompt: prompt length.
        """

    def widest(self, budgets: Int[np.ndarray, "lengths n"], budget: int, prompt: int) -> int:
        """Upper bound of a layer's pairs per KV head; static, for sizes of arrays.

        Args:
          budgets: `budgets` for each prompt length that may occur.
          budget: average over the layers.
          prompt: the longest prompt.
        """
        return int(budgets.max())

    def of_request(
        self,
        budgets: Int[Array, "n b"],
        importance: Callable[[], Float[Array, "n b"]],
        budget: int,
        prompt: Int[Array, "b"],
    ) -> Int[Array, "n b"]:
        """The layer budgets of a request's sequences; by default those known before the run.

        Args:
          budgets: those of `budgets` for the sequences' prompt lengths.
          importance: measures each layer's importance for each sequence (`eviction.importance`).
          budget: average over the layers.
          prompt: prompt length of each sequence.
        """
        return budgets


@dataclasses.dataclass(frozen=True)
class UniformLayers(LayerBudgets):
    """The same for every layer."""

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        return np.full(layers, min(budget, prompt), np.int32)


@dataclasses.dataclass(frozen=True)
class BoundaryMiddle(LayerBudgets):
    """MaskKV, equations 9-13: the first and last layers are one group, the middle another.

    Attributes:
      importance: offline profile of the layers (`eviction.calibrate`). With None all layers count alike, so
        budgets are uniform whatever the other fields; `MaskKV` then accepts only their defaults.
      beta: fraction of the budget that every layer gets.
      first: layers of the boundary group at the start.
      last: layers of the boundary group at the end.
    """

    importance: Annotated[Profile | None, NoneMeans("uniform budgets")] = None
    beta: Fraction = 0.4
    first: NonNegativeInt = 1
    last: NonNegativeInt = 1

    def __post_init__(self):
        super().__post_init__()
        if self.importance is not None and (min(self.importance) < 0 or not sum(self.importance)):
            raise ValueError(f"importance={self.importance} must not be negative nor all zero")

    @override
    def check(self):
        if self.importance is None and self != BoundaryMiddle():
            raise ValueError(
                f"{self!r} needs a profile, without which budgets are uniform: `eviction.calibrate` measures "
                "importance=, or use OnlineLayers"
            )

    @override
    def budgets(self, layers: int, budget: int, prompt: int) -> Int[np.ndarray, "n"]:
        # Rational arithmetic: equal importances make equal budgets, and ties go to the lower layer.
        check_depth("importance", self.importance, layers)
        importance = exactly(self.importance or np.ones(layers, int))
        base, extra = self.allocate(importance, budget)
        return round_to_total(base + extra, layers * budget, prompt)

    def allocate(self, importance: Vector, budget: int) -> tuple[int, Vector]:
        """Layer budgets before rounding and before the cap of the prompt (equations 9-13).

        Args:
          importance: Importance of the layers, [... n].
          budget: pairs per KV head, average over the layers.

        Returns:
          the base budget of every layer, and each layer's addition by importance [... n].
        """
        layers = importance.shape[-1]
        if self.first + self.last > layers:
            raise ValueError(f"first={self.first} + last={self.last} exceed the model's {layers} layers")
        boundary = (np.arange(layers) < self.first) | (np.arange(layers) >= layers - self.last)

        # Equation 9: every layer gets the base budget k_base = floor(beta B).
        base = int(self.beta * budget)

        # Equations 10-12: the rest, k_imp = L (B - k_base), goes to the two groups in proportion to their
        # summed importance.
        remaining = (budget - base) * layers * importance / importance.sum(-1, keepdims=True)

        # Equation 13: every layer of a group gets the same; an empty group gets nothing.
        def each(group):
            return remaining[..., group].sum(-1, keepdims=True) / max(int(group.sum()), 1) * group.astype(int)

        return base, each(boundary) + each(~boundary)


def check_depth(name: str, profile: tuple[float, ...] | None, layers: int):
    """Raises ValueError if a profile was measured on a model of another depth."""
    if profile is not None and len(profile) != layers:
        raise ValueError(f"{name} has {len(profile)} entries; expected one for each of {layers} layers")


@functools.lru_cache(maxsize=64)  # every layer of every step variant asks, and a table takes up to seconds
def table(
    layers: LayerBudgets, depth: int, budget: int, layout: Layout, block: int = 1
) -> Int[np.ndarray, "lengths n"]:
    """Budgets of `depth` layers for each prompt length that may occur: one, or with padding 0 .. prompt.

    With a `block`, what a prompt has beyond whole blocks of it does not count.
    """
    lengths = range(layout.prompt + 1) if layout.padded else (layout.prompt // block * block,)
    budgets = np.stack([layers.budgets(depth, budget, length) for length in lengths])
    budgets.setflags(write=False)
    return budgets
