"""LLaDA2.1's editing: decoded tokens of the current block may still be replaced (arXiv:2512.15745)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.options import NonNegativeInt, PositiveInt, TracedFraction
from dllm_jax.samplers import scores
from dllm_jax.samplers.candidates import Candidates, Decision
from dllm_jax.samplers.noise import Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.samplers.transfer import sure_or_best
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather


@dataclasses.dataclass(frozen=True)
class Edit(UntilDone):
    """Unmasks confident tokens, and replaces tokens of the block when another one is confident (LLaDA2.1).

    A block without masks continues until a step changes nothing, or for `most_steps` steps. Only tokens of
    the current block that an earlier step unmasked are replaced.

    With most_steps=0 and editing_threshold=1 it is `Threshold`, except that the confidence must exceed the
    threshold.

    Attributes:
      threshold: Confidence that a mask's token must exceed. 0.95 in the reference implementation, 0.7 for
        quality.
      editing_threshold: Confidence that a replacement must exceed. 0.9; 0.5 for quality, 1 never replaces.
      most_steps: Maximum number of steps of a block without masks.
      at_least: Minimum number of masks that a step unmasks.
    """

    threshold: TracedFraction = 0.95
    editing_threshold: TracedFraction = 0.9
    most_steps: NonNegativeInt = 16
    at_least: PositiveInt = 1

    edits: ClassVar[bool] = True

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """The masks above the threshold, or the most confident ones."""
        least = jnp.full(len(candidates.score), self.at_least, jnp.int32)
        return sure_or_best(candidates.score, self.threshold, least)

    @override
    def init(self, canvas: Canvas) -> Int[Array, "b"]:
        """Steps of the block that began without a mask."""
        return jnp.zeros_like(canvas.step)

    @override
    def decide(
        self, candidates: Candidates, memory: Int[Array, "b"], canvas: Canvas, noise: Noise | None
    ) -> Decision:
        """Fills and edits, both by the outputs of this step."""
        index, token, score, logits = candidates
        filled = self.transfer(candidates, canvas, noise)

        # A candidate that is no mask holds a token, which stays unless another one is sure.
        holds_token = (index < canvas.layout.length) & ~gather(canvas.masked, index)
        sure = scores.probability(logits, token) > self.editing_threshold
        edited = holds_token & sure & (token != gather(canvas.tokens, index))

        # The block goes on if this step found something to do, and there may be another step without masks.
        had_masks = jnp.any(score > -jnp.inf, axis=1)
        steps = jnp.where(canvas.block_step == 0, 0, memory) + ~had_masks
        keeps_block = (had_masks | jnp.any(edited, axis=1)) & (steps < self.most_steps)
        memory = jnp.where(canvas.active, steps, memory)
        return Decision(filled | edited, memory, keeps_block=keeps_block)

    @override
    def max_steps(self, layout: Layout) -> int:
        """One step per response position, and the steps of each block without masks."""
        return layout.response + (layout.blocks + layout.shares_first) * self.most_steps
