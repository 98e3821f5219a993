"""Certainty-prior-guided decoding (d2Cache, arXiv:2509.23094, section 4.1)."""

import dataclasses
from typing import Annotated, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.options import NoneMeans, TracedFraction, TracedPositiveInt, TracedWidth
from dllm_jax.samplers.base import Alg, Sampler
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.noise import Noise
from dllm_jax.samplers.transfer import even_schedule
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.selection import best, certainty_density


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertaintyPrior(Sampler):
    """Orders positions by confidence times the density of known tokens around them (d2Cache).

    Attributes:
      sigma: Width of the Gaussian, in positions.
      threshold: Threshold in [0, 1] of parallel decoding: every position whose confidence * density reaches
        it is unmasked, at least one per step. None uses the fixed schedule.
      tokens_per_step: Minimum number of tokens per step until the block is done, whatever the layout's steps.
        None uses the fixed schedule.
      alg: Measure of confidence (`Confidence`). "entropy" follows the reference: a negative score times a
        density prefers positions *far* from known tokens. It does not support a threshold.
    """

    sigma: TracedWidth = 10.0
    threshold: Annotated[TracedFraction | None, NoneMeans("a schedule")] = None
    tokens_per_step: Annotated[TracedPositiveInt | None, NoneMeans("a schedule")] = None
    alg: Alg = "prob"

    by_score: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.threshold is not None and self.alg == "entropy":
            raise ValueError(
                f"threshold={self.threshold} has no use with alg='entropy', whose scores lie below it: "
                "use 'prob' or 'margin', or tokens_per_step"
            )

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The positions with the largest product of confidence and certainty density."""
        # Equation 3's density of the canvas before the step. A position that is no candidate (-inf) stays
        # none even at density 0, where the product would be NaN.
        score = candidates.score
        density = certainty_density(canvas, candidates.index, self.sigma)
        priority = jnp.where(jnp.isfinite(score), score * density, -jnp.inf)
        if self._scheduled:
            return best(priority, even_schedule(canvas))

        # Without a schedule a step decodes at least one position, so that the block ends.
        count = 1 if self.tokens_per_step is None else self.tokens_per_step
        chosen = best(priority, count)
        return chosen if self.threshold is None else chosen | (priority >= self.threshold)

    @override
    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """As for every schedule; without one, a block is finished when nothing in it is eligible."""
        return super().finished(canvas) if self._scheduled else ~jnp.any(canvas.unanswered, axis=1)

    @override
    def max_steps(self, layout: Layout) -> int:
        """The layout's steps; without a schedule, one per response position."""
        return layout.scheduled_steps if self._scheduled else layout.response

    @property
    def _scheduled(self) -> bool:
        return self.threshold is None and self.tokens_per_step is None
