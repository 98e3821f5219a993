"""Schedules of block-causal models: SDAR's remasking (arXiv:2510.06303) and LLaDA2.0's (arXiv:2512.15745)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.options import TracedFraction
from dllm_jax.samplers.base import check_ends_unordered
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.noise import Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.samplers.transfer import even_schedule, sure_or_best
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best


@dataclasses.dataclass(frozen=True)
class Dynamic(UntilDone):
    """Unmasks all confident positions if there are as many as scheduled, otherwise the scheduled number.

    SDAR's "low-confidence dynamic" decoding, and with threshold=1 its "static" one; also LLaDA2.0's. The
    schedule spreads a whole block over its steps, so a block that a prompt's end shares finishes early.

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
    """Unmasks from left to right, as many positions per step as a whole block's schedule sets (SDAR)."""

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
    return jnp.maximum(even_schedule(canvas, canvas.layout.block), 1)
