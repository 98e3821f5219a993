"""Prophet's early commitment: decode everything as soon as the answer is sure (arXiv:2508.19982)."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.options import NoneMeans, NonNegativeInt, Options, PositiveInt, TracedNonNegativeFloat
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import places, spread


@dataclasses.dataclass(frozen=True)
class EarlyCommit(Options):
    """Unmasks all masks of a sequence at once, and ends it, when its answer is settled (Prophet).

    An answer is settled in a step in which the gap between the two largest logits, averaged over the answer's
    positions that may hold several tokens, reaches a threshold; without such positions it is settled too. The
    threshold falls as the generation goes on. The rule is tested before the step unmasks anything. It needs
    the logits of the answer and of all masks, so it applies only in steps that predict all of them, and in
    which no mask waits for a constraint.

    With thresholds that no gap reaches, the sampler is otherwise unchanged.
    Differences: The position of the answer may be left open; the reference implementation needs it.

    Attributes:
      answer: First position of the answer, counted from the response's first; in `infill` from the
        template's first. None uses all masked positions.
      positions: Number of positions of the answer, as far as the response goes.
      early: Threshold in the first third of the scheduled steps (below 0.33).
      middle: Threshold in the second third (below 0.67).
      late: Threshold in the last third.
    """

    answer: Annotated[NonNegativeInt | None, NoneMeans("all masks")] = None
    positions: PositiveInt = 5
    early: TracedNonNegativeFloat = 7.5
    middle: TracedNonNegativeFloat = 5.0
    late: TracedNonNegativeFloat = 2.5

    def asked(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions whose gaps count: of the answer, whatever they hold, or all masks.

        Raises:
          ValueError: the answer begins after the response.
        """
        in_response = canvas.position < canvas.layout.end  # neither text after it nor what completes a block
        if self.answer is None:
            return canvas.masked & in_response
        if self.answer >= (length := canvas.layout.end - canvas.layout.prompt):
            raise ValueError(f"answer={self.answer} must be below the response's length, {length}")
        place = canvas.position - canvas.first_block[:, None] - self.answer
        return canvas.everything & (place >= 0) & (place < self.positions) & in_response

    def threshold(self, canvas: Canvas) -> Float[Array, "b"]:
        """That of the coming step, by its number among the scheduled ones, counted from 1."""
        # 100 step / steps below 33 and 67, in whole numbers.
        percent, steps = 100 * (canvas.step + 1), canvas.layout.steps
        if canvas.layout.step_per_mask:
            steps = jnp.sum(canvas.masked | (canvas.decoded_at >= 0), axis=1)
        later = jnp.where(percent < 67 * steps, self.middle, self.late)
        return jnp.where(percent < 33 * steps, self.early, later)

    def commits(
        self, logits: Float[Array, "b c v"], index: Int[Array, "b c"], canvas: Canvas
    ) -> Bool[Array, "b"]:
        """Sequences whose answer is sure, and all of whose masks are predicted.

        Args:
          logits: Logits of the model, -inf at tokens that are not allowed.
          index: Positions of the logits, l = padding.
          canvas: state before the step.
        """
        # Gaps, in their places on the canvas.
        largest = jax.lax.top_k(logits.astype(jnp.float32), 2)[0]
        place = places(index, canvas.layout.length)
        gap, predicted = spread(largest[..., 0] - largest[..., 1], place, 0.0), place < index.shape[1]

        # Of what a step leaves out nothing is known: it can neither be averaged over nor decoded.
        asked = self.asked(canvas)
        wanted = asked | (canvas.masked & (canvas.position < canvas.layout.end))
        complete = jnp.any(asked, axis=1) & ~jnp.any(wanted & ~predicted, axis=1)

        # Where one token alone is allowed there is no gap, and nothing to be sure of.
        open_ = asked & jnp.isfinite(gap)
        count = jnp.sum(open_, axis=1)
        mean = jnp.sum(jnp.where(open_, gap, 0.0), axis=1) / jnp.maximum(count, 1)
        mean = jnp.where(count > 0, mean, jnp.inf)
        return canvas.active & complete & (mean >= self.threshold(canvas))
