"""Samplers that order positions by confidence or at random, most by a fixed schedule.

LLaDA's low-confidence and random remasking, and d2Cache's decoding by a certainty prior.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.options import NoneMeans, TracedFraction, TracedPositiveInt, TracedWidth
from dllm_jax.samplers.base import Alg, Sampler, check_ends_unordered
from dllm_jax.samplers.candidates import Candidates, Ids, Logits, Noise, Scores, require_noise
from dllm_jax.samplers.transfer import even_schedule, linear_schedule, rounded_schedule
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.selection import best, certainty_density, ranks
from dllm_jax.xla.reductions import any_marked

SCHEDULES = {"even": even_schedule, "rounded": rounded_schedule, "linear": linear_schedule}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSchedule(Sampler):
    """Decodes block masks / steps per block positions per step, the remainder in the early steps.

    Steps beyond the number of masks decode nothing but still run the network, as in the reference; a
    block-causal model takes none.

    Attributes:
      schedule: Distribution of a block's masks over its steps. "even" is LLaDA's, above. "rounded"
        decodes masks left / steps left in each step, rounded half to even (dllm). "linear" leaves
        floor(M (S - k) / S) of M masks after step k of S (RND1). The latter two leave out steps that decode
        nothing, round steps per block up, and let the last block be shorter.
    """

    schedule: Literal["even", "rounded", "linear"] = "even"

    by_score: ClassVar[bool] = True

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The most confident positions, as many as the transfer schedule wants in this step."""
        return best(candidates.score, self.count(canvas))

    def count(self, canvas: Canvas) -> Int[Array, "b"]:
        """How many positions of each sequence the coming step decodes."""
        return SCHEDULES[self.schedule](canvas)

    @override
    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """With the even schedule when it is over, otherwise as soon as nothing is masked."""
        if self.whole_blocks or self.allow_mask_token:
            return super().finished(canvas)
        return ~any_marked(canvas.unanswered)

    @override
    def max_steps(self, layout: Layout) -> int:
        """The scheduled steps; unless the schedule is even, each of them decodes something."""
        most = super().max_steps(layout)
        return most if self.whole_blocks else min(most, layout.response)

    @property
    @override
    def whole_blocks(self) -> bool:
        """Of the even schedule alone."""
        return self.schedule == "even"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence(FixedSchedule):
    """Unmasks the most confident positions first ("low-confidence remasking" of LLaDA).

    The method is that of arXiv:2502.09992, section 2.4.

    Attributes:
      alg: Measure of confidence: "prob" is the probability of the selected token, "margin" the best minus the
        second best probability, "entropy" the negative entropy. Computed without temperature in float32.
    """

    alg: Alg = "prob"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomOrder(FixedSchedule):
    """Unmasks positions in random order ("random remasking" of LLaDA); the confidence is a uniform draw.

    The method is that of arXiv:2502.09992, section 2.4.
    """

    def __post_init__(self):
        super().__post_init__()
        check_ends_unordered(self, "RandomOrder")

    @property
    @override
    def draws(self) -> bool:
        return True

    @override
    def confidence(
        self, logits: Logits, token: Ids, index: Ids, canvas: Canvas, noise: Noise | None
    ) -> Scores:
        """Uniform [0, 1) noise, drawn again at every step."""
        return require_noise(noise).order_uniform(canvas, index)

    @override
    def planned(self, canvas: Canvas, noise: Noise | None) -> Int[Array, "b l"]:
        """As many eligible positions as the transfer schedule wants, in the order of their draws."""
        # The same draws as in `confidence`, so `transfer` chooses these positions once the model has run.
        index = jnp.broadcast_to(canvas.position, canvas.tokens.shape)
        draw = require_noise(noise).order_uniform(canvas, index)
        turn = ranks(jnp.where(canvas.eligible, draw, -jnp.inf))
        return jnp.where(canvas.eligible & (turn < self.count(canvas)[:, None]), turn, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertaintyPrior(Sampler):
    """Orders positions by confidence times the density of known tokens around them (d2Cache).

    The method is that of arXiv:2509.23094, section 4.1.

    Attributes:
      sigma: Width of the Gaussian, in positions.
      threshold: Threshold in [0, 1] of parallel decoding: every position whose confidence * density reaches
        it is unmasked. None has no threshold.
      tokens_per_step: Minimum number of tokens per step until the block is done, whatever the layout's steps.
        None is 1 with a threshold; without one it uses the fixed schedule.
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
