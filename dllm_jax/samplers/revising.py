"""Samplers that revise: they take back or replace tokens that earlier steps of the block decoded.

WINO, wide in and narrow out, takes back what it doubts. LLaDA2.1's editing replaces tokens.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree
from typing_extensions import override

from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, NonNegativeInt, PositiveInt, TracedFraction
from dllm_jax.samplers import scores
from dllm_jax.samplers.base import Procedure
from dllm_jax.samplers.candidates import Candidates, Decision, Noise
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.samplers.transfer import sure_or_best
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import gather
from dllm_jax.state.selection import best, fraction_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class WINO(UntilDone):
    """Unmasks tokens with a low threshold, verifies them with a high one, and remasks those that fail (WINO).

    The method is that of arXiv:2507.18578.

    Each step also computes a shadow block (`dllm_jax.engine.branches`): the block's positions as if they were
    masked, each blind to the token that it verifies. Statistics do not count it. A token of an earlier step
    of the block is remasked if its probability there is below `narrow_out`, the least likely first. Of n
    newly unmasked tokens at most n - 1 are remasked, so a block of m masks takes at most m steps.

    Works with policies of the default layer but `DKVGreedy`, such as `DualCache`. Other policies, models with
    blocks, shifted output heads (Dream), `Sliding`, `AdaBlock` and interventions raise `ValueError`, as does
    a block that does not divide the answer, or each template of `infill`.

    With narrow_out=0 it is `Threshold(wide_in)`, except for the maximum number of tokens per step.

    Attributes:
      wide_in: Confidence from which a token is unmasked; the most confident one always is.
      narrow_out: Probability below which a token is remasked.
      fraction: Maximum fraction of the block's masks that one step unmasks, rounded down.
      fewest: Number of tokens that a step may always unmask.
      most: Maximum number of tokens per step.
    """

    wide_in: TracedFraction = 0.6
    narrow_out: TracedFraction = 0.9
    fraction: Fraction = 0.7
    fewest: PositiveInt = 5
    most: PositiveInt = 20

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(verifies=True)

    def __post_init__(self):
        super().__post_init__()
        if self.fewest > self.most:
            raise ValueError(f"fewest={self.fewest} must be at most most={self.most}")
        if self.confidence_eos_eot_inf:
            raise ValueError(
                "confidence_eos_eot_inf=True: WINO would take back every end-of-text that it decodes; use "
                "logits_eos_inf"
            )

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        if spec.shifted:
            raise ValueError(
                f"WINO does not support shifted output heads ({spec.family}): no position verifies its own "
                "token. Use Threshold()."
            )
        require_full_attention(spec, "WINO", fix="Use Threshold() or Edit()")

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """Wide in: the positions that reach the threshold, up to a limit, and the surest in any case."""
        score = candidates.score
        masks = jnp.sum(score > -jnp.inf, axis=1, dtype=jnp.int32)

        # Of a block with m masks the released code decodes at most clamp(floor(0.7 m), 5, 20) at once.
        limit = jnp.clip(fraction_of(masks, self.fraction, score.shape[1]), self.fewest, self.most)
        reached = jnp.where(score >= self.wide_in, score, -jnp.inf)
        return best(reached, limit) | best(score, 1)

    @override
    def decide(self, candidates: Candidates, memory: PyTree, canvas: Canvas, noise: Noise | None) -> Decision:
        """Wide in and narrow out, both by the outputs of this step."""
        index, _, _, logits = candidates
        chosen = self.transfer(candidates, canvas, noise)

        # A candidate that is no mask holds a token to be verified; its logits are those of its shadow.
        holds_token = (index < canvas.layout.length) & ~gather(canvas.masked, index)
        belief = scores.probability(logits, gather(canvas.tokens, index))
        doubt = jnp.where(holds_token & (belief < self.narrow_out), -belief, -jnp.inf)

        # Fewer are taken back than decoded, so that every step leaves fewer masks.
        at_most = jnp.sum(chosen, axis=1, dtype=jnp.int32) - 1
        return Decision(chosen, memory, revoked=best(doubt, jnp.maximum(at_most, 0)))


@dataclasses.dataclass(frozen=True)
class Edit(UntilDone):
    """Unmasks confident tokens, and replaces tokens of the block when another one is confident (LLaDA2.1).

    The method is that of arXiv:2602.08676.

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

    @property
    @override
    def procedure(self) -> Procedure:
        return Procedure(edits=True)

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
