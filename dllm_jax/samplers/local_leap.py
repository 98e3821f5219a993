"""LocalLeap: a lower threshold for the neighbours of sure tokens (arXiv:2510.07081)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.options import TracedFraction, TracedNonNegativeInt
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.noise import Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best
from dllm_jax.traced import is_traced


@dataclasses.dataclass(frozen=True)
class LocalLeap(UntilDone):
    """Unmasks every position that reaches a threshold (an anchor), and by a lower one those near an anchor.

    Use it where `Threshold` is: it unmasks the same tokens in a step, and more of their neighbours. Anchors
    are candidates of the step itself, never tokens of earlier steps. The most confident position is unmasked
    in any case.

    Equals `Threshold(threshold)` when: radius=0, or relaxed=threshold.

    Differences: [MASK] is never chosen; the released code repeats a step that chooses nothing else for ever.
      Each sequence goes on to its next block alone.

    Attributes:
      threshold: Minimum probability of an anchor.
      relaxed: Minimum probability near an anchor, at most the threshold; 0.75 for LLaDA and 0.8 for Dream in
        the released scripts.
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
        """The anchors, their neighbours that are sure enough, and the most confident position."""
        index, score = candidates.index, candidates.score
        anchor = score >= self.threshold

        # Distances are between positions: candidates that are neighbours in the list may lie far apart.
        distance = jnp.abs(index[:, :, None] - index[:, None])
        near = jnp.any(anchor[:, None] & (distance <= self.radius), axis=2)
        surest = best(score, 1)
        return surest | anchor | (near & (score >= self.relaxed))
