"""What a run keeps of its steps: recorders, each with its state and the statistics that follow from it."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine import trace
from dllm_jax.engine.generation import Generation, Plan
from dllm_jax.engine.growth import answer_length, moved_with
from dllm_jax.engine.prefix import reused_of
from dllm_jax.engine.stats import Record
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options.base import users_own
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.samplers.scores import ruled_out
from dllm_jax.state.cache import Proposal
from dllm_jax.state.canvas import Canvas, answer_end
from dllm_jax.state.contexts import in_blocks
from dllm_jax.state.growing import GrowingCanvas, growth_of
from dllm_jax.xla.reductions import any_marked, count_marked

# -- log-probabilities of unmasked tokens ----------------------------------------------------------


class LogProbs(NamedTuple):
    """Log-probabilities of the tokens that a run unmasked, in nats.

    They are those of the distribution that the step drew from: after guidance, constraints, temperature,
    top-p and top-k; at temperature 0 the model's own. [MASK] counts in it wherever it is allowed.

    Attributes:
      log_prob: Log-probability of each token in the step that unmasked it; 0 where none did (prompt, padding,
        masks that are left, end-of-text filled in after a stop).
      decoded_at: Denoising step that unmasked it, by the sequence's own count from 0; -1 where none did. A
        token that was remasked or replaced has the last such step.
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

    def add(self, before: Canvas, after: Canvas, found: "LogProbs") -> "LogProbs":
        """Takes over what a step unmasked, and forgets what it masked again.

        Args:
          before: Canvas before the step.
          after: Canvas after the step.
          found: Log-probabilities of the step's candidates, at their positions.
        """
        changed = changed_by(before, after)
        added = self.where(changed, found)
        return added.where(changed & after.masked, LogProbs.none(after, self.top_tokens.shape[2]))


def changed_by(before: Canvas, after: Canvas) -> Bool[Array, "b l"]:
    """Positions that a step gave another token, or verified the draft's."""
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


# -- recorders: each begins with the first step, is told of every step, and adds its numbers to the result


class Taken(NamedTuple):
    """Account of one step, which counts for its active sequences alone.

    Attributes:
      sequences: Places of the sequences in the trace of the whole batch.
      number: Number of forward passes that each sequence had taken part in before.
      before: Canvas before the step.
      after: Canvas after it.
      left: Canvas that the step leaves: `after`, unless answers have grown, and positions have moved.
      computed: Positions fed through the network.
      executed: Positions that the program ran, of all sequences.
      read: Positions that the computed ones attended to.
      extra: Positions that layers computed beyond the selection (`Cache.extra_positions`).
      finite: Sequences whose logits were finite.
      proposal: Candidates offered to the sampler.
      branches: Canvases computed of each sequence.
      kept: What recorders keep of candidates so far, with the step, by the recorder's name.
    """

    sequences: Int[Array, "b"]
    number: Int[Array, "b"]
    before: Canvas
    after: Canvas
    left: Canvas
    computed: Bool[Array, "b l"]
    executed: int
    read: Bool[Array, "b l"]
    extra: Float[Array, "b n"]
    finite: Bool[Array, "b"]
    proposal: Proposal
    branches: Int[Array, "b"] | Bool[Array, "b"]
    kept: dict[str, LogProbs]


class Recorder:
    """Keeps something of every step, in arrays with an axis of sequences.

    Attributes:
      axis: Axis of the sequences in what is kept.
      of_group: Whether a step of few sequences sees only their part of what is kept.
    """

    axis: ClassVar[int] = 0
    of_group: ClassVar[bool] = True

    def begin(self, canvas: Canvas, generation: Generation, extra: Float[Array, "b n"]) -> PyTree:
        """Returns what is kept before the first step; nothing by default.

        Args:
          canvas: Canvas before the first step.
          generation: Constants of the run.
          extra: Positions that layers computed before the first step (`Cache.extra_positions`).
        """
        return ()

    def add(self, kept: PyTree, taken: Taken) -> PyTree:
        """Returns what is kept after one more step; the same by default."""
        return kept

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """Fields of `Stats`, given what all recorders kept, the last canvas and the final tokens."""
        return {}


def recorders_of(plan: Plan, spec: ModelSpec) -> dict[str, Recorder]:
    """The recorders of a run, by name."""
    offered = (
        ("counts", Counts(), True),
        ("idle", IdleSteps(_may_miss(plan)), plan.sampler.may_idle or _may_miss(plan)),
        ("causal_passes", CausalPasses(), spec.context.has_causal_passes),
        ("accepted_tokens", AcceptedTokens(), plan.layout.drafts),
        ("reused", ReusedPrefix(), bool(plan.prefix)),
        ("drafted", DraftedSteps(), bool(plan.drafting)),
        ("unfilled_tokens", UnfilledTokens(), bool(plan.constraints)),
        ("masked_tokens", MaskedTokens(plan), not (plan.constraints or plan.sampler.allow_mask_token)),
        ("lengths", Lengths(), plan.sampler.grows),
        ("confidence", Confidences(), plan.confidence),
        ("logprobs", TokenLogProbs(plan.logprobs or 0), plan.logprobs is not None),
        ("trace", Steps(plan.step_limit if plan.trace else 0), plan.trace),
    )
    return {name: recorder for name, recorder, wanted in offered if wanted}


def begin_record(generation: Generation, canvas: Canvas, extra: Float[Array, "b n"]) -> Record:
    """The record of a run before its first step."""
    recorders = recorders_of(generation.plan, canvas.spec)
    return {name: recorder.begin(canvas, generation, extra) for name, recorder in recorders.items()}


def add_to_record(plan: Plan, record: Record, taken: Taken) -> Record:
    """The record with one more step."""
    recorders = recorders_of(plan, taken.before.spec)
    return {name: recorder.add(record[name], taken) for name, recorder in recorders.items()}


# -- recorders -----------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Running sums for the `Stats` that every run has."""

    computed_tokens: Int[Array, "b"]
    executed_tokens: Float[Array, "b"]
    widened_tokens: Float[Array, "b"]
    refreshes: Int[Array, "b"]
    finite: Bool[Array, "b"]


class Counts(Recorder):
    """Counts forward passes and tokens."""

    def begin(self, canvas: Canvas, generation: Generation, extra: Float[Array, "b n"]) -> Sums:
        """Nothing but what layers computed before the first step."""
        zeros = jnp.zeros(canvas.tokens.shape[0], jnp.int32)
        none = zeros.astype(jnp.float32)
        return Sums(zeros, none, jnp.mean(extra, axis=1), zeros, jnp.ones(zeros.shape, bool))

    def add(self, kept: Sums, taken: Taken) -> Sums:
        """Counts the positions of a step; padding is counted in those that the program runs alone."""
        before = taken.before
        counted = taken.computed & before.valid
        everything = before.active & ~any_marked(counted != before.valid)
        share = taken.executed / jnp.maximum(jnp.sum(before.active), 1)
        return Sums(
            computed_tokens=kept.computed_tokens + count_marked(counted),
            executed_tokens=kept.executed_tokens + before.active * share,
            widened_tokens=kept.widened_tokens + jnp.mean(taken.extra, axis=1),
            refreshes=kept.refreshes + everything.astype(jnp.int32),
            finite=kept.finite & taken.finite,
        )

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """The sums, and what follows from them and the last canvas."""
        # Exact decoding would compute all valid positions in every forward.
        kept: Sums = record["counts"]
        positions = exact_positions(canvas, passes_of(record, canvas))
        recomputed = (kept.computed_tokens + kept.widened_tokens) / jnp.maximum(positions, 1)

        # The answer ends before the first end-of-text, also where positions after it are decoded.
        end = answer_end(canvas)
        decoded = canvas.decoded
        if canvas.layout.end < canvas.layout.length:
            decoded &= canvas.position < canvas.layout.end
        # What a template holds besides its masks was given.
        generated = decoded if canvas.layout.prompt else decoded & (canvas.decoded_at >= 0)
        return kept._asdict() | {
            "nfe": passes_of(record, canvas),
            "cache_ratio": jnp.where(positions > 0, 1.0 - recomputed, 0.0).astype(jnp.float32),
            "decoded_tokens": count_marked(generated),
            "answer_tokens": count_marked(decoded & (canvas.position < end[:, None])),
        }


class Counter(Recorder):
    """Counts something of each sequence's steps, in a field of `Stats` and of the record.

    Attributes:
      name: Name of the field.
    """

    name: ClassVar[str]

    def begin(self, canvas: Canvas, generation: Generation, extra) -> Int[Array, "b"]:
        """None yet."""
        return jnp.zeros_like(canvas.step)

    def add(self, kept: Int[Array, "b"], taken: Taken) -> Int[Array, "b"]:
        """Adds the count of a step."""
        return kept + self.count(taken)

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """The sum."""
        return {self.name: record[self.name]}

    def count(self, taken: Taken) -> Int[Array, "b"] | Bool[Array, "b"]:
        """The count of one step."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class IdleSteps(Counter):
    """Counts the steps that had nothing to decode although the block had masks for them.

    Attributes:
      may_miss: Whether the policy may compute no position that predicts a mask.
    """

    may_miss: bool

    name = "idle"

    def count(self, taken: Taken) -> Bool[Array, "b"]:
        """A block with fewer masks than steps, as templates have, is idle under every schedule."""
        before = taken.before
        had_masks = before.schedule_step < before.block_masks
        masks = jnp.any(before.unanswered, axis=1)
        idle = before.active & ~masks & had_masks
        if not self.may_miss:
            return idle
        missed = masks & ~jnp.any(taken.proposal.score > -jnp.inf, axis=1) & ~before.causal[:, 0]
        return idle | (before.active & missed)


def _may_miss(plan: Plan) -> bool:
    """Whether the policy is a user's, whose sets may leave out what predicts the masks."""
    return users_own(plan.policy, "select", "eligible") and not (plan.constraints or plan.sampler.revises)


class CausalPasses(Counter):
    """Counts the causal passes of models with a causal context."""

    name = "causal_passes"

    def count(self, taken: Taken) -> Bool[Array, "b"]:
        """The active sequences whose step was one."""
        return taken.before.active & taken.before.causal[:, 0]


class AcceptedTokens(Recorder):
    """Counts the tokens that verifications of drafted blocks accepted."""

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """The tokens after the prompt whose keys and values are final: the pass over the prompt is none."""
        return {"accepted_tokens": jnp.maximum(in_blocks(canvas).stored - canvas.layout.prompt, 0)}


class ReusedPrefix(Recorder):
    """Tells how much of the prompt was taken from a computed prefix."""

    def begin(self, canvas: Canvas, generation: Generation, extra) -> PyTree:
        """Tokens and bytes, which no step changes."""
        return reused_of(canvas, generation.model)

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """`Stats.reused_tokens` and `Stats.reused_bytes`."""
        return dict(zip(("reused_tokens", "reused_bytes"), record["reused"], strict=True))


class Drafted(NamedTuple):
    """Canvases computed so far, and the forward passes that verified them."""

    branches: Int[Array, "b"]
    passes: Int[Array, "b"]


class DraftedSteps(Recorder):
    """Counts the canvases computed, the passes, and the steps of the sampler that they verified."""

    def begin(self, canvas: Canvas, generation: Generation, extra) -> Drafted:
        """None yet."""
        return Drafted(jnp.zeros_like(canvas.step), jnp.zeros_like(canvas.step))

    def add(self, kept: Drafted, taken: Taken) -> Drafted:
        """Adds the branches of a step."""
        return Drafted(kept.branches + taken.branches, kept.passes + taken.before.active)

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """`Stats.branches` and `Stats.sampler_steps`."""
        return {"branches": record["drafted"].branches, "sampler_steps": canvas.step}


def passes_of(record: Record, canvas: Canvas) -> Int[Array, "b"]:
    """Forward passes that each sequence has taken part in: its steps, unless one verifies several."""
    return record["drafted"].passes if "drafted" in record else canvas.step


def exact_positions(canvas: Canvas, passes: Int[Array, "b"]) -> Int[Array, "b"]:
    """Positions that exact decoding would have computed in the sequence's passes so far."""
    growing = isinstance(canvas, GrowingCanvas)
    return canvas.growth.positions if growing else count_marked(canvas.valid) * passes


class UnfilledTokens(Recorder):
    """Counts the masks that constraints left without a token."""

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """Masks of the response that are left although the logits were finite."""
        left = (tokens == canvas.spec.mask_id) & canvas.valid & canvas.response
        left &= (canvas.position < canvas.layout.end) & record["counts"].finite[:, None]
        return {"unfilled_tokens": jnp.sum(left, axis=1, dtype=jnp.int32)}


@dataclasses.dataclass(frozen=True)
class MaskedTokens(Recorder):
    """Counts the masks that are left although nothing explains them.

    Attributes:
      plan: Options of the run.
    """

    plan: Plan

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """Those of the answer; a policy with eligible positions of its own may leave what follows its end."""
        left = (tokens == canvas.spec.mask_id) & canvas.valid & canvas.response
        left &= (canvas.position < canvas.layout.end) & record["counts"].finite[:, None]
        if canvas.layout.prompt and type(self.plan.policy).eligible is not Policy.eligible:
            left &= canvas.position < answer_end(canvas)[:, None]
        return {"masked_tokens": jnp.sum(left, axis=1, dtype=jnp.int32)}


class Lengths(Recorder):
    """Tells how long answers have become, and how."""

    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """`Stats.length` and what it came from, which the canvas counts (`state.canvas`)."""
        growth = growth_of(canvas)
        counts = {name: getattr(growth, name) for name in ("insertions", "growth_steps", "wanted_more")}
        return counts | {"length": answer_length(canvas), "removed_tokens": growth.removals}


class Confidences(Recorder):
    """Keeps the confidence with which each position was unmasked; infinity elsewhere."""

    def begin(self, canvas: Canvas, generation: Generation, extra) -> Float[Array, "b l"]:
        """Nothing is unmasked yet."""
        return jnp.full(canvas.tokens.shape, jnp.inf, jnp.float32)

    def add(self, kept: Float[Array, "b l"], taken: Taken) -> Float[Array, "b l"]:
        """Takes over the scores of what a step unmasked, and forgets those of what it masked again."""
        new = jnp.where(taken.after.masked, jnp.inf, taken.proposal.score)
        kept = jnp.where(changed_by(taken.before, taken.after), new, kept)
        return moved_with(taken.left, kept, jnp.full_like(kept, jnp.inf))


@dataclasses.dataclass(frozen=True)
class TokenLogProbs(Recorder):
    """Keeps the log-probabilities of unmasked tokens.

    Attributes:
      count: Number of most likely tokens kept with each.
    """

    count: int

    def begin(self, canvas: Canvas, generation: Generation, extra) -> LogProbs:
        """Nothing is unmasked yet."""
        return LogProbs.none(canvas, self.count)

    def add(self, kept: LogProbs, taken: Taken) -> LogProbs:
        """Those that the step made of what was kept, since one pass may take several steps of the sampler."""
        return moved_with(taken.left, taken.kept["logprobs"], LogProbs.none(taken.left, self.count))


@dataclasses.dataclass(frozen=True)
class Steps(Recorder):
    """Keeps the trace: every step of every sequence (`engine.trace`).

    Attributes:
      limit: Number of steps that there is room for.
    """

    limit: int

    axis: ClassVar[int] = 1
    of_group: ClassVar[bool] = False

    def begin(self, canvas: Canvas, generation: Generation, extra) -> trace.Steps:
        """Room for all steps."""
        return trace.no_steps(canvas, self.limit)

    def add(self, kept: trace.Steps, taken: Taken) -> trace.Steps:
        """Writes the step in place, since the loop carries the trace."""
        before = taken.before
        widened = taken.extra >= jnp.sum(before.valid & ~taken.computed, axis=1, keepdims=True)
        return trace.add(
            kept,
            taken.sequences,
            taken.number,
            before,
            taken.left,
            taken.computed,
            taken.read,
            widened,
            taken.proposal,
        )


# -- results -------------------------------------------------------------------------------------------


def final_logprobs(record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> LogProbs | None:
    """The log-probabilities of a finished generation, given its tokens; None if none are recorded."""
    if "logprobs" not in record:
        return None
    found: LogProbs = record["logprobs"]
    return found.where(tokens != canvas.tokens, LogProbs.none(canvas, found.top_tokens.shape[2]))


def final_trace(record: Record, canvas: Canvas) -> trace.Trace | None:
    """The trace of the steps so far; None if none is recorded."""
    return trace.completed(record["trace"], canvas, passes_of(record, canvas)) if "trace" in record else None
