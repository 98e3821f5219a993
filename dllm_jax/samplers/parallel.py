"""Parallel decoding: samplers that unmask all tokens that are sure enough, until a block is done.

Fast-dLLM's threshold and factor; LocalLeap, a lower threshold for the neighbors of sure tokens; EB-Sampler,
entropy-bounded unmasking; and the schedules of the block-causal models SDAR and LLaDA2.0.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.options import (
    TracedFraction,
    TracedNonNegativeFloat,
    TracedNonNegativeInt,
    TracedPositiveFloat,
    check_argument,
)
from dllm_jax.samplers import scores
from dllm_jax.samplers.base import Alg, Sampler, check_ends_unordered
from dllm_jax.samplers.candidates import Candidates, Noise
from dllm_jax.samplers.transfer import even_schedule, passing_prefix, sure_or_best
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.selection import best
from dllm_jax.traced import Number, is_traced
from dllm_jax.xla.reductions import any_marked


@dataclasses.dataclass(frozen=True, kw_only=True)
class UntilDone(Sampler, abc.ABC):
    """Base of samplers that stay in a block until nothing in it is masked (parallel decoding).

    Every step selects at least one position, unless a subclass overrides `max_steps`. `steps` of the layout
    ends no block; some subclasses schedule by it, such as `Dynamic`.
    """

    until_done: ClassVar[bool] = True

    @override
    def finished(self, canvas: Canvas) -> Bool[Array, "b"]:
        """A sequence has finished the block when none of its positions is eligible any more."""
        return ~any_marked(canvas.unanswered)

    @override
    def max_steps(self, layout: Layout) -> int:
        """One step per response position, since each step selects at least one."""
        return layout.response

    @property
    @override
    def whole_blocks(self) -> bool:
        """Only where tokens are verified, against a block of one width."""
        return self.procedure.verifies

    @property
    @override
    def may_idle(self) -> bool:
        """Only with a `finished` of its own, which is not looked at: no."""
        return False


@dataclasses.dataclass(frozen=True)
class Threshold(UntilDone):
    """Unmasks every position whose confidence reaches the threshold, and always the most confident one.

    Use it first for parallel decoding. The number of steps depends on the text. The
    method is Fast-dLLM's (arXiv:2505.22618, section 3.3).

    Attributes:
      threshold: Minimum confidence, in [0, 1]; the paper uses 0.9. With alg="entropy", the maximum entropy in
        nats, at least 0: 0.45 to 0.5 in dParallel (arXiv:2509.26488) and d3LLM.
      alg: Measure of confidence: "prob", "margin" or "entropy".
    """

    threshold: TracedNonNegativeFloat = 0.9
    alg: Alg = dataclasses.field(default="prob", kw_only=True)

    by_score: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.alg != "entropy":
            check_argument("threshold", self.threshold, TracedFraction)

    counts_no_steps: ClassVar[bool] = True

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

    This is the rule of Fast-dLLM's paper (arXiv:2505.22618, theorem 1); both released versions are off by one
    at its edge.

    Attributes:
      factor: Positive factor; larger values unmask more tokens per step.
    """

    factor: TracedPositiveFloat = 1.0

    by_score: ClassVar[bool] = True
    counts_no_steps: ClassVar[bool] = True

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The longest prefix of the ranking by confidence that passes theorem 1's bound."""
        return best(candidates.score, passing_prefix(candidates.score, self.factor))


@dataclasses.dataclass(frozen=True)
class LocalLeap(UntilDone):
    """Unmasks every position that reaches a threshold (an anchor), and by a lower one those near an anchor.

    Use it where `Threshold` is: it unmasks the same tokens in a step, and more of their neighbors
    (LocalLeap, arXiv:2510.07081). Anchors are candidates of the step itself, never tokens of earlier steps.
    The most confident position is unmasked in any case.

    Equals `Threshold(threshold)` when: radius=0, or relaxed=threshold.

    Differences: By default [MASK] is not chosen; the reference (lizhuo-luo/DAWN) repeats a step that chooses
      only that. Each sequence goes on to its next block alone.

    Attributes:
      threshold: Minimum probability of an anchor.
      relaxed: Minimum probability near an anchor, at most the threshold; 0.75 for LLaDA and 0.8 for Dream in
        DAWN's scripts.
      radius: Maximum distance from an anchor, in positions.
    """

    threshold: TracedFraction = 0.9
    relaxed: TracedFraction = 0.75
    radius: TracedNonNegativeInt = 4

    by_score: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if not is_traced(self.threshold, self.relaxed) and self.relaxed > self.threshold:
            raise ValueError(
                f"relaxed={self.relaxed} must be at most threshold={self.threshold}: near an anchor the "
                "threshold is lower"
            )

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The anchors, their neighbors that are sure enough, and the most confident position."""
        index, score = candidates.index, candidates.score
        anchor = score >= self.threshold

        # Distances are between positions: candidates that are neighbors in the list may lie far apart.
        distance = jnp.abs(index[:, :, None] - index[:, None])
        near = jnp.any(anchor[:, None] & (distance <= self.radius), axis=2)
        surest = best(score, 1)
        return surest | anchor | (near & (score >= self.relaxed))


@dataclasses.dataclass(frozen=True)
class EBSampler(UntilDone):
    """Unmasks the n most confident positions for the largest n whose entropies H have sum H - max H <= gamma.

    The method is EB-Sampler, arXiv:2505.24857.

    The sum without the largest entropy bounds the mutual information of tokens that are unmasked together. At
    least one position is unmasked per step.

    Equals one token per step when: gamma=0, unless the model is certain of one (entropy 0).

    Attributes:
      gamma: Bound in nats; larger values unmask more tokens per step. 0.01 for LLaDA in PC-Sampler's
        comparison.
      alg: Measure of confidence that orders the positions (`Confidence`).
    """

    gamma: TracedNonNegativeFloat = 0.01
    alg: Alg = dataclasses.field(default="prob", kw_only=True)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The longest prefix of the ranking by confidence whose entropies keep to the bound."""
        score, entropy = candidates.score, -scores.negative_entropy(candidates.logits)
        count = bounded_prefix(score, entropy, self.gamma)

        # A position alone has nothing to bound: the surest one is decoded in any case.
        return best(score, jnp.maximum(count, 1))


def bounded_prefix(
    score: Float[Array, "b c"], entropy: Float[Array, "b c"], gamma: Number
) -> Int[Array, "b"]:
    """The largest n for which the n best positions have sum of entropies - largest entropy <= gamma.

    Args:
      score: orders the positions, ties to the lower index; -inf is no candidate.
      entropy: Entropy of each position's distribution, in nats.
      gamma: the bound.
    """
    order = jnp.argsort(-score, axis=1, stable=True)
    ranked = jnp.take_along_axis(entropy, order, axis=1)

    # The sum without its largest term never falls as the prefix grows, so those that pass are a prefix.
    # Entropies of 0 may be rounded to less.
    rest = jnp.cumsum(ranked, axis=1) - jax.lax.cummax(ranked, axis=1)
    candidate = jnp.take_along_axis(score, order, axis=1) > -jnp.inf
    passes = (jnp.maximum(rest, 0) <= gamma) & candidate
    return jnp.sum(jnp.cumprod(passes.astype(jnp.int32), axis=1), axis=1)


@dataclasses.dataclass(frozen=True)
class Dynamic(UntilDone):
    """Unmasks all confident positions if there are as many as scheduled, otherwise the scheduled number.

    SDAR's "low-confidence dynamic" decoding (arXiv:2510.06303), and with threshold=1 its "static" one; also
    LLaDA2.0's (arXiv:2512.15745). The schedule spreads a whole block over its steps, so a block that a
    prompt's end shares finishes early.

    Differences: If fewer masks are left than scheduled, SDAR's reference implementation overwrites prompt
    tokens.

    Attributes:
      threshold: Confidence to exceed, in [0, 1]. 0.85 in SDAR, 0.95 in LLaDA2.0.
    """

    threshold: TracedFraction = 0.85

    by_score: ClassVar[bool] = True

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """All positions above the threshold, or as many as the block's schedule wants."""
        return sure_or_best(candidates.score, self.threshold, scheduled(canvas))


@dataclasses.dataclass(frozen=True)
class Sequential(UntilDone):
    """Unmasks from left to right, as many positions per step as a whole block's schedule sets (SDAR).

    The method is that of arXiv:2510.06303.
    """

    by_score: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_ends_unordered(self, "Sequential")

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The leftmost masks."""
        first = jnp.where(candidates.score > -jnp.inf, -candidates.index.astype(jnp.float32), -jnp.inf)
        return best(first, scheduled(canvas))


def scheduled(canvas: Canvas) -> Int[Array, "b"]:
    """How many positions a whole block's schedule decodes in the coming step, at least one."""
    whole = jnp.full_like(canvas.step, canvas.layout.block)
    if canvas.layout.step_per_mask:
        return jnp.ones_like(whole)
    if not (canvas.layout.prompt or canvas.spec.context.has_blocks):  # templates may be shorter than a block
        whole = jnp.minimum(whole, canvas.layout.end - canvas.first_block)
    return jnp.maximum(even_schedule(canvas, whole), 1)
