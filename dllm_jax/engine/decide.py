"""The decision of a step: candidates meet the vocabulary, and the sampler chooses among them.

The step of a canvas and the verification of drafts decide by the same function: each draft is then the canvas
of a sequence of its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.block_schedule import delimited_end, end_step, ending_block, in_window, offered_positions
from dllm_jax.engine.branches import decoded_in_block, has_shadow, place_in_shadow
from dllm_jax.engine.generation import Generation, Plan
from dllm_jax.engine.growth import end_confidence
from dllm_jax.engine.records import LogProbs, of_candidates
from dllm_jax.nn.arithmetic import guided
from dllm_jax.nn.gemma import expected
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.state.cache import Proposal
from dllm_jax.state.canvas import Canvas, end, write
from dllm_jax.state.rows import Rows, compact, gather, one_stream, places, repeat, scatter, spread
from dllm_jax.xla.reductions import any_marked


class Proposed(NamedTuple):
    """The candidates of a step, and what is known of them.

    Attributes:
      candidates: Scored positions whose predictor was computed, with tokens, scores and logits.
      finite: Sequences all of whose logits are finite, and no confidence NaN, which no sampler would decode.
        Those of padding may be anything.
      commits: Sequences that commit to all of their masks now (`EarlyCommit`).
      found: What recorders keep of the candidates, by the recorder's name.
      block_end: End of each sequence's block, if steps set it (`engine.block_schedule`); else None.
      end_confidence: Confidence in the end of each answer, if answers grow (`engine.growth`).
    """

    candidates: Candidates
    finite: Bool[Array, "b"]
    commits: Bool[Array, "b"]
    found: dict[str, LogProbs]
    block_end: Int[Array, "b"] | None
    end_confidence: Float[Array, "b"]


def propose(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    verifying: Bool[Array, "b"],
) -> Proposed:
    """The candidates: each scored position gets its logits, a token and a score.

    Args:
      generation: the constants.
      canvas: state before the step.
      rows: Positions that the conditional stream computed.
      hidden: the residual stream after the last layer, of all streams; after it that of the shadow block, if
        the sampler verifies tokens, which are then candidates too, or a draft.
      verifying: Sequences whose draft is verified (`Canvas.verifying`).
    """
    plan, sampler, length = generation.plan, generation.plan.sampler, canvas.layout.length
    index = _positions(plan, canvas, rows)
    holds_token = _holds_token(sampler, canvas, index)
    shadowed = holds_token if sampler.verifies else verifying[:, None]
    unconstrained = _logits(generation, canvas, rows, hidden, index, shadowed)
    logits, waits = constrain_logits(generation, canvas, index, unconstrained)
    proposed = sampler.propose(logits, index, canvas, generation.noise)
    found = {}
    if plan.logprobs is not None:
        found["logprobs"] = of_candidates(sampler, proposed, logits, canvas, plan.logprobs)

    # No sampler would decode a NaN; what stands at entries that are no candidates may be anything.
    candidate = index < length
    known = ~any_marked(~jnp.isfinite(unconstrained)) & ~jnp.isnan(proposed.score)
    finite = ~any_marked(candidate & ~known)

    # The rule of an early end looks at the whole answer; a sampler sees masks, and what it revises. What no
    # token is allowed to waits: it is no candidate of this step, and a token there stays.
    commits, only_read = settled(sampler, logits, index, canvas, holds_token)
    candidate &= ~only_read
    commits &= finite & ~jnp.any(waits & candidate & ~holds_token, axis=1)
    holds_token, candidate = holds_token & ~waits, candidate & ~waits
    index_offered = jnp.where(only_read | waits, length, index)

    # What holds a token has no score, and unless it may be edited it is offered no other.
    score = jnp.where(candidate & ~holds_token, proposed.score, -jnp.inf)
    token = proposed.token if sampler.edits else jnp.where(holds_token, canvas.spec.mask_id, proposed.token)
    return Proposed(
        proposed._replace(index=index_offered, score=score, token=token),
        finite,
        commits,
        found,
        delimited_end(canvas, index, unconstrained),
        end_confidence(plan, canvas, proposed, logits, unconstrained),
    )


def settled(
    sampler: Sampler,
    logits: Float[Array, "b c v"],
    index: Int[Array, "b c"],
    canvas: Canvas,
    holds_token: Bool[Array, "b c"],
) -> tuple[Bool[Array, "b"], Bool[Array, "b c"]]:
    """The sequences whose answer is settled, and entries that only the rule for that reads; none without it.

    Args:
      sampler: Sampler of the run, which may have such a rule (`EarlyCommit`).
      logits: Logits of the positions.
      index: Positions, l = padding.
      canvas: State before the step.
      holds_token: Entries that hold a token that the sampler may change.
    """
    if (rule := sampler.early_commit) is None:
        return jnp.zeros_like(canvas.done), jnp.zeros_like(holds_token)
    return rule.commits(logits, index, canvas), ~(gather(canvas.masked, index) | holds_token)


def _logits(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    index: Int[Array, "b c"],
    shadowed: Bool[Array, "b #c"],
) -> Float[Array, "b c v"]:
    """Logits of the positions, each from its predictor's entry in `hidden`, or from that of its shadow.

    With classifier-free guidance those of the two streams are combined.
    """
    plan, spec = generation.plan, canvas.spec
    predictor = index
    if not predicts_itself(spec):
        padded = jnp.pad(canvas.predictor, ((0, 0), (0, 1)), constant_values=canvas.layout.length)
        predictor = jnp.take_along_axis(padded, index, axis=1)
    slot = rows.slot(predictor)
    if has_shadow(plan.sampler, spec):
        slot = jnp.where(shadowed, rows.index.shape[1] + place_in_shadow(canvas, index), slot)
    logits = unembed(generation.model.params, spec, gather(hidden, repeat(slot, plan.streams)))
    if plan.streams == 1:
        return logits
    conditional, unconditional = (one_stream(logits.astype(jnp.float32), i, 2) for i in range(2))
    return guided(conditional, unconditional, plan.sampler.cfg_scale)


def predicts_itself(spec: ModelSpec) -> bool:
    """Whether each position's own output predicts it in every step (`Canvas.predictor`)."""
    return not spec.shifted and not spec.context.has_causal_passes


def _positions(plan: Plan, canvas: Canvas, rows: Rows) -> Int[Array, "b c"]:
    """The positions that are candidates, compacted to a static number: only they meet the vocabulary."""
    # A position can be predicted if its predictor (with Dream's shifted head, its left neighbor) was
    # computed.
    predicted = rows.mask()
    if not predicts_itself(canvas.spec):
        predicted = jnp.take_along_axis(predicted, canvas.predictor, axis=1)
    candidates = _scored(plan, canvas) & predicted

    # Masks outside of the block are candidates only if the response is scored, or if earlier blocks were left
    # with masks.
    sampler, layout = plan.sampler, plan.layout
    everywhere = sampler.allow_mask_token or plan.scores_response or sampler.scored == "answer"
    most = layout.response if everywhere else layout.widest_block
    if sampler.verifies:
        # What is verified is in the shadow, whether or not the step computes it.
        return compact(candidates | decoded_in_block(canvas), most)
    return compact(candidates, min(most, rows.index.shape[1]))


def _scored(plan: Plan, canvas: Canvas) -> Bool[Array, "b l"]:
    """The positions that meet the vocabulary if their predictor is computed."""
    sampler = plan.sampler
    if sampler.scored == "answer":
        return canvas.valid & canvas.response
    scored = canvas.masked if plan.scores_response else offered_positions(plan.policy, canvas)
    if canvas.layout.adaptive:
        scored |= in_window(canvas)
    if sampler.early_commit:
        scored |= sampler.early_commit.asked(canvas)
    return scored | decoded_in_block(canvas) if sampler.edits else scored


def _holds_token(sampler: Sampler, canvas: Canvas, index: Int[Array, "b c"]) -> Bool[Array, "b c"]:
    """Entries that hold a token, where samplers revise some or score the whole answer."""
    real = index < canvas.layout.length
    if sampler.scored == "answer":
        return ~gather(canvas.masked, index) & real
    return gather(decoded_in_block(canvas), index) & real if sampler.revises else jnp.zeros_like(real)


# -- constraints ----------------------------------------------------------------------------------------


def constrain_logits(
    generation: Generation, canvas: Canvas, index: Int[Array, "b c"], logits: Float[Array, "b c v"]
) -> tuple[Float[Array, "b c v"], Bool[Array, "b c"]]:
    """The logits with -inf at tokens that are not allowed, in float32; unchanged without constraints.

    Args:
      generation: the constants.
      canvas: state before the step.
      index: Canvas positions of the logits, l = padding.
      logits: guided logits.

    Returns:
      the logits, and positions that no token is allowed to: they wait (`Constraint.allowed`).
    """
    fixed, constraints = generation.allowed, generation.plan.constraints
    waits = jnp.zeros(index.shape, bool)
    if not (fixed or constraints):
        return logits, waits
    allowed = fixed.at(index) if fixed else jnp.ones(logits.shape, bool)
    for constraint in constraints:
        allowed &= constraint.allowed(canvas, index)
    if constraints:
        # [MASK] decodes nothing, nor does an end-of-text that the sampler rules out.
        never = [canvas.spec.mask_id, *[canvas.spec.eos_id] * generation.plan.sampler.logits_eos_inf]
        of_text = jnp.all(jnp.arange(logits.shape[-1])[:, None] != jnp.asarray(never), axis=1)
        waits = ~jnp.any(allowed & of_text, axis=2)
        allowed |= waits[..., None]  # no proposal there is decoded
    return jnp.where(allowed, logits.astype(jnp.float32), -jnp.inf), waits


class Decided(NamedTuple):
    """Changes of a step to the canvas; of a step with drafts, [b k ..] for k canvases of each sequence.

    Attributes:
      chosen: Positions that are unmasked, or get another token.
      proposal: Token and score of every position.
      finite: Sequences whose logits are finite.
      changes: Changes of the canvas besides the tokens: functions of it, which are applied in this order.
      memory: State that the sampler keeps.
      found: What recorders keep of the step's candidates, on the canvas, by the recorder's name.
      block_end: End of each sequence's block, if steps set it; else None.
      end_confidence: Confidence in the end of each answer, if answers grow.
    """

    chosen: Bool[Array, "b l"]
    proposal: Proposal
    finite: Bool[Array, "b"]
    changes: tuple[Partial, ...]
    memory: PyTree
    found: dict[str, LogProbs]
    block_end: Int[Array, "b"] | None
    end_confidence: Float[Array, "b"]

    def of_branch(self, branch: Int[Array, "b"]) -> "Decided":
        """The decision on one of the canvases of each sequence."""
        return jax.tree.map(lambda a: a[jnp.arange(len(branch)), branch], self)

    def added_to(self, record: dict[str, Any], before: Canvas, after: Canvas) -> dict[str, LogProbs]:
        """What recorders keep of candidates, of all steps with this one."""
        return {name: record[name].add(before, after, found) for name, found in self.found.items()}


def decide(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    memory: PyTree,
    verifying: Bool[Array, "b"],
) -> Decided:
    """Decides which candidates are unmasked, and what else changes.

    Args:
      generation: Constants of the loop.
      canvas: Canvas before the step.
      rows: Positions that have an output.
      hidden: Residual stream after the last layer (`propose`).
      memory: State that the sampler kept of the last step.
      verifying: Sequences whose draft is verified.
    """
    proposed = propose(generation, canvas, rows, hidden, verifying)
    canvas = ending_block(canvas, proposed.block_end)
    index, token, score, _ = proposed.candidates
    offered = gather(offered_positions(generation.plan.policy, canvas), index)
    masks = proposed.candidates._replace(score=jnp.where(offered, score, -jnp.inf))
    masks, delayed = generation.plan.sampler.delay(masks, canvas)
    decision = generation.plan.sampler.decide(masks, memory, canvas, generation.noise)

    # From candidates to the canvas.
    place = places(index, canvas.layout.length)
    on_canvas = functools.partial(marked_on_canvas, finite=proposed.finite, place=place)
    commits = proposed.commits[:, None]
    changes = decision.changes(lambda marked: on_canvas(marked & ~commits))
    if generation.plan.sampler.early_commit:
        changes += (Partial(end, ends=proposed.commits),)
    proposal = Proposal(
        spread(decision.tokens_of(token), place, canvas.spec.mask_id),
        spread(score.astype(jnp.float32), place, -jnp.inf),
        jax.tree.map(lambda marked: spread(marked, place, False), delayed),
    )
    return Decided(
        chosen=on_canvas(decision.chosen | (commits & (score > -jnp.inf))),
        proposal=proposal,
        finite=proposed.finite,
        changes=changes,
        memory=_with_expected(generation, decision.memory, proposed.candidates, canvas),
        found=jax.tree.map(lambda values: gather(values, place), proposed.found),
        block_end=proposed.block_end,
        end_confidence=proposed.end_confidence,
    )


def _with_expected(generation: Generation, memory: Any, candidates: Candidates, canvas: Canvas) -> Any:
    """A sampler's memory with the embeddings that this step expects in the block, if it denoises noise."""
    if not generation.plan.sampler.of_noise:
        return memory
    place = candidates.index - canvas.block_start[:, None]
    place = jnp.where(candidates.index < canvas.layout.length, place, memory.soft.shape[1])
    found = expected(generation.model.params, candidates.logits)
    begins = (canvas.active & canvas.causal[:, 0])[:, None, None]
    return memory._replace(soft=jnp.where(begins, 0, scatter(memory.soft, place, found)))


def marked_on_canvas(
    marked: Bool[Array, "b c"], finite: Bool[Array, "b"], place: Int[Array, "b l"]
) -> Bool[Array, "b l"]:
    """Canvas positions of the marked candidates, in sequences whose logits are finite."""
    return spread(marked & finite[:, None], place, False)


def apply(plan: Plan, canvas: Canvas, decided: Decided) -> Canvas:
    """The canvas after a step: tokens are written, then blocks and sequences end that are finished."""
    canvas = ending_block(canvas, decided.block_end)
    after = write(canvas, decided.chosen, decided.proposal.token)
    for change in decided.changes:
        after = change(after)
    return end_step(plan, after, decided.finite)
