"""Log-probabilities and confidences of the tokens that a run unmasks."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.features.growth import moved_with
from dllm_jax.engine.generation import Feature, Generation, Seen, StepRecord
from dllm_jax.engine.stats import Record
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.scores import ruled_out
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import gather, places, spread


class LogProbs(NamedTuple):
    """Log-probabilities of the tokens that a run unmasked, in nats.

    They are those of the distribution that the step drew from: after guidance, constraints, temperature,
    top-p and top-k; untempered at temperature 0, and of `EntropyNoise`. [MASK] counts in it wherever it
    is allowed.

    Attributes:
      log_prob: Log-probability of each token in the step that unmasked it; 0 where none did (prompt, padding,
        masks that are left, end-of-text filled in after a stop).
      decoded_at: Denoising step that unmasked it, by the sequence's own count from 0; -1 where none did. A
        token that was remasked or replaced has the last such step. One of a model without a mask token has
        the last step that predicted it.
      top_tokens: The k most likely tokens of that step, best first; [MASK] is none of them unless the sampler
        may select it. mask_id where no step unmasked the position.
      top_log_probs: Log-probabilities of `top_tokens`; -inf where fewer than k are allowed, 0 where no step
        unmasked the position.
    """

    log_prob: Float[Array, "b l"]
    decoded_at: Int[Array, "b l"]
    top_tokens: Int[Array, "b l k"]
    top_log_probs: Float[Array, "b l k"]

    @staticmethod
    def none(canvas: Canvas, count: int) -> "LogProbs":
        """Nothing decoded yet."""
        shape = (*canvas.tokens.shape, count)
        top = jnp.full(shape, canvas.spec.mask_id, jnp.int32), jnp.zeros(shape)
        return LogProbs(jnp.zeros(shape[:2]), jnp.full(shape[:2], -1, jnp.int32), *top)

    def where(self, changed: Bool[Array, "b l"], other: "LogProbs") -> "LogProbs":
        """The values of `other` at some positions."""
        chosen = lambda new, old: jnp.where(changed.reshape(*changed.shape, *[1] * (old.ndim - 2)), new, old)
        return jax.tree.map(chosen, other, self)

    def add(self, before: Canvas, after: Canvas, finding: "LogProbs") -> "LogProbs":
        """Takes over what a step unmasked, and forgets what it masked again.

        Args:
          before: Canvas before the step.
          after: Canvas after the step.
          finding: Log-probabilities of the step's candidates, at their positions.
        """
        changed = changed_by(before, after, finding.decoded_at >= 0)
        # A draft that skips steps counts others than the sequence itself.
        at = jnp.where(finding.decoded_at >= 0, before.step[:, None], -1)
        added = self.where(changed, finding._replace(decoded_at=at))
        return added.where(changed & undone(after), LogProbs.none(after, self.top_tokens.shape[2]))


def undone(after: Canvas) -> Bool[Array, "b l"]:
    """Positions of which a step keeps nothing: masks, unless its prediction may become their token."""
    return after.masked & after.spec.has_mask_token


def changed_by(before: Canvas, after: Canvas, predicted: Bool[Array, "b l"]) -> Bool[Array, "b l"]:
    """Positions that a step gave another token, or verified the draft's.

    A canvas of noise is decoded as a whole, by the outputs of the last steps that predicted its positions.
    """
    if not before.spec.has_mask_token:
        return predicted
    changed = before.tokens != after.tokens
    if before.layout.drafts:
        changed |= (after.decoded_at == before.step[:, None]) & before.active[:, None]
    return changed


def of_candidates(
    sampler: Sampler, candidates: Candidates, logits: Float[Array, "b c v"], canvas: Canvas, count: int
) -> LogProbs:
    """Log-probabilities of the candidates' tokens, and the most likely tokens of each position.

    Args:
      sampler: Sampler, which tempers and filters.
      candidates: Proposal of the sampler.
      logits: Logits that it was proposed from.
      canvas: State before the step.
      count: Number of most likely tokens.
    """
    drawn = sampler.drawn(logits, canvas)
    total = jax.nn.logsumexp(drawn, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(drawn, candidates.token[..., None], axis=-1) - total
    offered = drawn if sampler.allow_mask_token else ruled_out(drawn, canvas.spec.mask_id)
    top, tokens = jax.lax.top_k(offered, count)
    step = jnp.broadcast_to(canvas.step[:, None], candidates.token.shape)
    return LogProbs(chosen[..., 0], step, tokens.astype(jnp.int32), top - total)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Confidences(Feature):
    """Keeps the confidence with which each position got its token; infinity elsewhere."""

    name: ClassVar[str] = "confidence"
    keeps_steps: ClassVar[bool] = True

    def begin(self, canvas: Canvas, generation: Generation, extra) -> Float[Array, "b l"]:
        """Nothing is unmasked yet."""
        return jnp.full(canvas.tokens.shape, jnp.inf, jnp.float32)

    def find(self, generation: Generation, canvas: Canvas, seen: Seen) -> Float[Array, "b l"]:
        """The scores of the proposed tokens, also where they would replace others."""
        index, _, score, _ = seen.candidates
        return spread(score.astype(jnp.float32), places(index, canvas.layout.length), -jnp.inf)

    def keep(
        self, entry: Float[Array, "b l"], before: Canvas, after: Canvas, finding: Float[Array, "b l"]
    ) -> Float[Array, "b l"]:
        """Takes over the scores of what a step decoded, and forgets those of what it masked again."""
        new = jnp.where(undone(after), jnp.inf, finding)
        return jnp.where(changed_by(before, after, finding > -jnp.inf), new, entry)

    def add(self, record: Record, step: StepRecord) -> Float[Array, "b l"]:
        """Those that the pass made of what was kept, moved along."""
        confidences: Float[Array, "b l"] = record[self.name]
        return moved_with(step.left, confidences, jnp.full_like(confidences, jnp.inf))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLogProbs(Feature):
    """Keeps the log-probabilities of unmasked tokens.

    Attributes:
      count: Number of most likely tokens kept with each.
    """

    count: int = dataclasses.field(metadata={"static": True})

    name: ClassVar[str] = "logprobs"
    keeps_steps: ClassVar[bool] = True

    def begin(self, canvas: Canvas, generation: Generation, extra) -> LogProbs:
        """Nothing is unmasked yet."""
        return LogProbs.none(canvas, self.count)

    def find(self, generation: Generation, canvas: Canvas, seen: Seen) -> LogProbs:
        """Log-probabilities of the candidates' tokens, on the canvas."""
        sampler = generation.plan.sampler
        logprobs = of_candidates(sampler, seen.candidates, seen.logits, canvas, self.count)
        place, none = places(seen.candidates.index, canvas.layout.length), LogProbs.none(canvas, self.count)
        on_canvas = jax.tree.map(lambda values: gather(values, place), logprobs)
        return none.where(place < seen.candidates.index.shape[1], on_canvas)

    def keep(self, entry: LogProbs, before: Canvas, after: Canvas, finding: LogProbs) -> LogProbs:
        """Takes over what a step of the sampler unmasked."""
        return entry.add(before, after, finding)

    def add(self, record: Record, step: StepRecord) -> LogProbs:
        """Those that the pass made of what was kept, moved along."""
        return moved_with(step.left, record[self.name], LogProbs.none(step.left, self.count))

    def output(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> LogProbs:
        """The log-probabilities, without those of tokens that no step decoded."""
        recorded: LogProbs = record[self.name]
        no_token = (tokens != canvas.tokens) | canvas.masked
        return recorded.where(no_token, LogProbs.none(canvas, self.count))
