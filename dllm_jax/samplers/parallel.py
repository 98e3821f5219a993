"""Confidence-aware parallel decoding: all tokens that are sure enough (arXiv:2505.22618, section 3.3)."""

import abc
import dataclasses
from typing import ClassVar

from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.options import TracedFraction, TracedPositiveFloat
from dllm_jax.samplers.base import Alg, Sampler
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.noise import Noise
from dllm_jax.samplers.transfer import passing_prefix
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.selection import best
from dllm_jax.xla.reductions import any_marked


@dataclasses.dataclass(frozen=True, kw_only=True)
class UntilDone(Sampler, abc.ABC):
    """Base of samplers that stay in a block until nothing in it is masked (parallel decoding).

    Every step unmasks at least one position. `steps` of the layout is not used.
    """

    @override
    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """A sequence has finished the block when none of its positions is eligible any more."""
        return ~any_marked(canvas.unanswered)

    @override
    def max_steps(self, layout: Layout) -> int:
        """One step per response position, since each step decodes at least one."""
        return layout.response

    @property
    @override
    def whole_blocks(self) -> bool:
        """Only where tokens are verified, against a block of one width."""
        return self.verifies

    @property
    @override
    def may_idle(self) -> bool:
        """Only with a `finished` of its own, which is not looked at: no."""
        return False


@dataclasses.dataclass(frozen=True)
class Threshold(UntilDone):
    """Unmasks every position whose confidence reaches the threshold, and always the most confident one.

    Use it first for parallel decoding. The number of steps depends on the text.

    Attributes:
      threshold: Minimum confidence, in [0, 1]; the paper uses 0.9. With alg="entropy", the maximum entropy in
        nats: 0.45 to 0.5 in dParallel (arXiv:2509.26488) and d3LLM.
      alg: Measure of confidence: "prob", "margin" or "entropy".
    """

    threshold: TracedFraction = 0.9
    alg: Alg = dataclasses.field(default="prob", kw_only=True)

    by_score: ClassVar[bool] = True

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """All positions whose confidence reaches the threshold, and the most confident one in any case."""
        # Without it a step might decode nothing, and the block would never be done.
        surest = best(candidates.score, 1)
        least = -self.threshold if self.alg == "entropy" else self.threshold
        return surest | (candidates.score >= least)


@dataclasses.dataclass(frozen=True)
class Factor(UntilDone):
    """Unmasks the n most confident positions for the largest n with (n + 1)(1 - c_n) < factor, at least one.

    This is the paper's rule (theorem 1); both released versions are off by one at its edge.

    Attributes:
      factor: Positive factor; larger values unmask more tokens per step.
    """

    factor: TracedPositiveFloat = 1.0

    by_score: ClassVar[bool] = True

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The longest prefix of the ranking by confidence that passes theorem 1's bound."""
        return best(candidates.score, passing_prefix(candidates.score, self.factor))
