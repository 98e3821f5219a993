"""Inputs of a schedule other than the policy, and constructors for its steps."""

import dataclasses
from typing import Annotated

from annotated_types import Ge

from dllm_jax.decoding.widths import step_widths
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, NoneMeans, Options
from dllm_jax.policies import Policy
from dllm_jax.roofline.steps import Step
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class Assumed(Options):
    """What the data decides during a run.

    Attributes:
      widened: fraction of the layers that Elastic-Cache recomputes in full after drift, averaged over its
        steps; at least 0.
      nucleus: fraction of the canvas in d2Cache's nucleus; None takes the policy's p, as if influence were
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
    def response_inputs(self) -> int:
        """The response and the position that predicts its first token."""
        return self.layout.response_inputs(self.spec.shifted)

    def step(self, policy: Policy, selected: int) -> Step:
        """A step over `selected` positions of a dense cache, in the width that the engine takes for it."""
        length = self.layout.length
        if selected == length:
            return self.over_canvas(length if policy.stores(self.spec) else 0)
        width = min((w for w in step_widths(policy, self.spec, self.layout) if w >= selected), default=None)
        if width is None:  # computed in place
            return self.over_canvas(length)
        return Step(False, width, length, min(self.layout.block, width), width)

    def over_canvas(self, written: float = 0, **more: float) -> Step:
        """A full step that stores `written` pairs."""
        length = self.layout.length
        return Step(True, length, length, self.layout.block, written, **more)

    def score_flops(self, rows: float, slots: float) -> float:
        """FLOPs of a layer's attention scores, where statistics compute them once more."""
        return 2 * rows * slots * self.spec.heads * self.spec.head
