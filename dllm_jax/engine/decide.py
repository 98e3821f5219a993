"""The decision of a step: candidates meet the vocabulary, and the sampler chooses among them.

The step of a canvas and the verification of drafts decide by the same function: each draft is then the canvas
of a sequence of its own.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.block_schedule import end_step, offered_positions
from dllm_jax.engine.branches import decoded_in_block, has_shadow, place_in_shadow
from dllm_jax.engine.generation import Findings, Generation, Plan, Seen, StepDecision
from dllm_jax.nn.arithmetic import guided
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.shift import predicts_itself
from dllm_jax.samplers.base import Sampler
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.state.cache import Proposal
from dllm_jax.state.canvas import Canvas, write
from dllm_jax.state.rows import Rows, compact, gather, one_stream, places, repeat, spread
from dllm_jax.xla.reductions import any_marked


def propose(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    verifying: Bool[Array, "b"],
) -> tuple[Candidates, Bool[Array, "b"], Findings]:
    """Proposes the candidates: each scored position gets its logits, a token and a score.

    Args:
      generation: the constants.
      canvas: state before the step.
      rows: Positions that the conditional stream computed.
      hidden: the residual stream after the last layer, of all streams; after it that of the shadow block, if
        the sampler verifies tokens, which are then candidates too, or a draft.
      verifying: Sequences whose draft is verified (`Canvas.verifies`).

    Returns:
      the candidates; sequences all of whose logits are finite, and no confidence NaN, which no sampler would
      decode (those of padding may be anything); and what features find in the candidates.
    """
    plan, sampler, length = generation.plan, generation.plan.sampler, canvas.layout.length
    index = _positions(plan, canvas, rows)
    holds_token = _holds_token(sampler, canvas, index)
    shadowed = holds_token if sampler.procedure.verifies else verifying[:, None]
    unconstrained = _logits(generation, canvas, rows, hidden, index, shadowed)
    logits, waits = unconstrained, jnp.zeros(index.shape, bool)
    for feature in plan.acting:
        logits, waiting = feature.constrain(generation, canvas, index, logits)
        waits = waits if waiting is None else waits | waiting
    proposed = sampler.propose(logits, index, canvas, generation.noise)

    # No sampler would decode a NaN; what stands at entries that are no candidates may be anything.
    # Gemma's logits are bounded, so finite or NaN, and then the score is NaN too.
    candidate, known = index < length, ~jnp.isnan(proposed.score)
    if canvas.spec.gemma is None:
        known = ~any_marked(~jnp.isfinite(unconstrained)) & known
    finite = ~any_marked(candidate & ~known)
    only_read = jnp.zeros(index.shape, bool)
    if any(feature.reads_tokens for feature in plan.acting):
        only_read = ~(gather(canvas.masked, index) | holds_token)
    candidate &= ~only_read
    seen = Seen(proposed, logits, unconstrained, candidate, holds_token, waits, finite)
    findings = {feature.name: feature.find(generation, canvas, seen) for feature in plan.acting}

    # A sampler sees masks, and what it revises. What no token is allowed to waits: it is no candidate of this
    # step, and a token there stays. What holds a token has no score, and unless it may be edited it is
    # offered no other.
    candidate, holds_token = candidate & ~waits, holds_token & ~waits
    score = jnp.where(candidate & ~holds_token, proposed.score, -jnp.inf)
    token = proposed.token
    if not sampler.procedure.edits:
        token = jnp.where(holds_token, canvas.spec.mask_id, token)
    offered = jnp.where(only_read | waits, length, index)
    return proposed._replace(index=offered, score=score, token=token), finite, findings


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
    if rows.full and canvas.spec.full_steps_are_causal:
        most = 0  # causal passes predict nothing
    if sampler.procedure.verifies:
        # What is verified is in the shadow, whether or not the step computes it.
        return compact(candidates | decoded_in_block(canvas), most)
    return compact(candidates, min(most, rows.index.shape[1]))


def _scored(plan: Plan, canvas: Canvas) -> Bool[Array, "b l"]:
    """The positions that meet the vocabulary if their predictor is computed."""
    sampler = plan.sampler
    if sampler.scored == "answer":
        return canvas.valid & canvas.response
    scored = canvas.masked if plan.scores_response else offered_positions(plan.policy, canvas)
    for feature in plan.acting:
        more = feature.scored(plan, canvas)
        scored = scored if more is None else scored | more
    return scored | decoded_in_block(canvas) if sampler.procedure.edits else scored


def _holds_token(sampler: Sampler, canvas: Canvas, index: Int[Array, "b c"]) -> Bool[Array, "b c"]:
    """Entries that hold a token, where samplers revise some or score the whole answer."""
    real = index < canvas.layout.length
    if sampler.scored == "answer":
        return ~gather(canvas.masked, index) & real
    return gather(decoded_in_block(canvas), index) & real if sampler.revises else jnp.zeros_like(real)


def decide(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    memory: PyTree,
    verifying: Bool[Array, "b"],
) -> StepDecision:
    """Decides which candidates are unmasked, and what else changes.

    Args:
      generation: Constants of the loop.
      canvas: Canvas before the step.
      rows: Positions that have an output.
      hidden: Residual stream after the last layer (`propose`).
      memory: State that the sampler kept of the last step.
      verifying: Sequences whose draft is verified.
    """
    plan, sampler = generation.plan, generation.plan.sampler
    candidates, finite, findings = propose(generation, canvas, rows, hidden, verifying)
    for feature in plan.acting:
        canvas = feature.before_decision(canvas, findings[feature.name])
    index, token, score, _ = candidates
    offered = gather(offered_positions(plan.policy, canvas), index)
    masks, delayed = sampler.delay(candidates._replace(score=jnp.where(offered, score, -jnp.inf)), canvas)
    decision = sampler.decide(masks, memory, canvas, generation.noise)
    for feature in plan.acting:
        decision = feature.after_decision(decision, score, findings[feature.name])

    # From candidates to the canvas.
    place = places(index, canvas.layout.length)
    on_canvas = functools.partial(marked_on_canvas, finite=finite, place=place)
    proposal = Proposal(
        spread(decision.tokens_of(token), place, canvas.spec.mask_id),
        spread(score.astype(jnp.float32), place, -jnp.inf),
        jax.tree.map(lambda marked: spread(marked, place, False), delayed),
    )
    chosen, changes = on_canvas(decision.chosen), decision.changes(on_canvas)
    return StepDecision(chosen, proposal, finite, changes, decision.memory, findings)


def marked_on_canvas(
    marked: Bool[Array, "b c"], finite: Bool[Array, "b"], place: Int[Array, "b l"]
) -> Bool[Array, "b l"]:
    """Canvas positions of the marked candidates, in sequences whose logits are finite."""
    return spread(marked & finite[:, None], place, False)


def apply(plan: Plan, canvas: Canvas, decided: StepDecision) -> Canvas:
    """The canvas after a step: tokens are written, then blocks and sequences end that are finished."""
    for feature in plan.acting:
        canvas = feature.before_decision(canvas, decided.findings[feature.name])
    after = write(canvas, decided.chosen, decided.proposal.token)
    for change in decided.changes:
        after = change(after)
    for feature in plan.acting:
        after = feature.after_writing(after, decided.findings[feature.name])
    return end_step(plan, after, decided.finite)
