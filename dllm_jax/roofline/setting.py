"""Inputs of a schedule other than the policy, and constructors for its steps."""

import dataclasses
from typing import Annotated

from annotated_types import Ge

from dllm_jax import policies as p
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, NoneMeans, Options
from dllm_jax.roofline.steps import Step
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class Assumed(Options):
    """What the data decides during a run.

    Attributes:
      widened: share of the layers that Elastic-Cache recomputes in full after drift, averaged over its
        steps; at least 0.
      nucleus: share of the canvas in d2Cache's nucleus; None takes the policy's p, as if influence were
        uniform: an upper bound.
      uneven: pairs that the widest head of a layer keeps over the average of its heads in MaskKV; at
        least 1.
    """

    widened: Fraction = 0
    nucleus: Annotated[Fraction | None, NoneMeans("the policy's p")] = None
    uneven: Annotated[float, Ge(1)] = 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model, a geometry, and what is assumed."""

    spec: ModelSpec
    layout: Layout
    assumed: Assumed

    @property
    def per_step(self) -> float:
        """Tokens decoded per step."""
        return self.layout.block / self.layout.steps_per_block

    @property
    def answering(self) -> int:
        """The response and the row that predicts its first token."""
        return min(self.layout.response + self.spec.shifted, self.layout.length)

    def whole(self, written: float = 0, **more: float) -> Step:
        """A step over the canvas that stores `written` pairs."""
        length = self.layout.length
        return Step(True, length, length, self.layout.block, written, **more)

    def width(self, policy: p.Policy, rows: float) -> int | None:
        """The narrowest width the policy compiles that holds the rows, None if none does."""
        return min((w for w in policy.widths(self.layout) if w >= rows), default=None)

    def part(self, policy: p.Policy, rows: float, **more: float) -> Step:
        """A step over `rows` of a dense cache, padded to a width; whole if none holds them."""
        length, width = self.layout.length, self.width(policy, rows)
        if width is None:
            return self.whole(length, **more)
        return Step(False, width, length, min(self.layout.block, width), width, **more)

    def joined(self, rows: int, stored: float, **more: float) -> Step:
        """A step over `rows` that attend to a copy of the `stored` pairs and to their own, not kept."""
        slots = stored + rows
        return Step(False, rows, slots, min(self.layout.block, rows), moved=stored + slots, **more)

    def again(self, rows: float, slots: float) -> float:
        """FLOPs of computing a layer's attention scores once more."""
        return 2 * rows * slots * self.spec.heads * self.spec.head
