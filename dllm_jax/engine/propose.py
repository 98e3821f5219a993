"""The candidates of a step: which positions meet the vocabulary, and the token and score of each."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.adaptive import delimited_end, in_window
from dllm_jax.engine.block_schedule import offered_positions
from dllm_jax.engine.branches import decoded_in_block, place_in_shadow
from dllm_jax.engine.constrain import constrain_logits
from dllm_jax.engine.generation import Generation
from dllm_jax.engine.logprobs import LogProbs, of_candidates
from dllm_jax.engine.plan import Plan
from dllm_jax.nn.arithmetic import guided
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.state.canvas import Canvas, repeat, stream
from dllm_jax.state.rows import Rows, compact, gather
from dllm_jax.xla.reductions import any_marked


def propose(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    verifying: Bool[Array, "b"] | None = None,
) -> tuple[Candidates, Bool[Array, "b"], Bool[Array, "b"] | None, LogProbs | None, Int[Array, "b"] | None]:
    """The candidates: scored positions whose predictor was computed, with tokens, scores and logits.

    And whether all logits of the sequence's candidates are finite, and no confidence is NaN, which no sampler
    would decode; those of padding may be anything. And whether it commits to all of its masks now, None if
    the sampler has no such rule (`EarlyCommit`). And the log-probabilities, None if none are asked for.
    And the block's end, if this step sets it (`engine.adaptive`).

    Args:
      generation: the constants.
      canvas: state before the step.
      rows: Positions that the conditional stream computed.
      hidden: the residual stream after the last layer, of all streams; after it that of the shadow block, if
        the sampler verifies tokens, which are then candidates too, or a draft.
      verifying: Sequences whose draft is verified (`Canvas.verifying`); None if the sampler makes none.
    """
    plan, spec, layout = generation.plan, canvas.spec, canvas.layout
    sampler = plan.sampler
    index = _positions(plan, canvas, rows, verify=sampler.verifies)

    # Logits of each candidate are computed from its predictor's entry in `hidden`.
    predictor = index
    if not predicts_itself(spec):
        padded = jnp.pad(canvas.predictor, ((0, 0), (0, 1)), constant_values=layout.length)
        predictor = jnp.take_along_axis(padded, index, axis=1)
    slot = rows.slot(predictor)

    # A token to be verified takes its logits from its shadow: a position is a mask or holds one, never both.
    holds_token = jnp.zeros_like(index, bool)
    if sampler.revises:
        holds_token = gather(decoded_in_block(canvas), index) & (index < layout.length)
    if sampler.verifies:
        slot = jnp.where(holds_token, rows.index.shape[1] + place_in_shadow(canvas, index), slot)
    elif verifying is not None and not spec.shifted:
        slot = jnp.where(verifying[:, None], rows.index.shape[1] + place_in_shadow(canvas, index), slot)
    logits = unembed(generation.model.params, spec, gather(hidden, repeat(slot, plan.streams)))

    # Classifier-free guidance: the two streams' logits are combined before anything looks at them.
    if plan.streams == 2:
        conditional, unconditional = (stream(logits.astype(jnp.float32), i, 2) for i in range(2))
        logits = guided(conditional, unconditional, sampler.cfg_scale)
    unconstrained, end = logits, delimited_end(canvas, index, logits)
    logits, waits = constrain_logits(generation, canvas, index, logits)
    proposed = sampler.propose(logits, index, canvas, generation.noise)
    count = plan.logprobs
    found = None if count is None else of_candidates(sampler, proposed, logits, canvas, count)
    candidate = index < layout.length

    # No sampler would decode a NaN; what stands at entries that are no candidates may be anything.
    known = ~any_marked(~jnp.isfinite(unconstrained)) & ~jnp.isnan(proposed.score)
    finite = ~any_marked(candidate & ~known)

    # All of the answer is looked at; a sampler sees masks, and what it revises.
    committed = None
    if (rule := sampler.early_commit) is not None:
        committed = rule.commits(logits, index, canvas) & finite
        seen = gather(canvas.masked, index) | holds_token
        proposed = proposed._replace(index=jnp.where(seen, index, layout.length))
        candidate &= seen
        committed = (
            committed if waits is None else committed & ~jnp.any(waits & candidate & ~holds_token, axis=1)
        )

    # What no token is allowed to waits: it is no candidate of this step, and a token there stays.
    if waits is not None:
        holds_token, candidate = holds_token & ~waits, candidate & ~waits
        proposed = proposed._replace(index=jnp.where(candidate, index, layout.length))

    # What holds a token has no score, and unless it may be edited it is offered no other.
    score = jnp.where(candidate & ~holds_token, proposed.score, -jnp.inf)
    token = proposed.token if sampler.edits else jnp.where(holds_token, spec.mask_id, proposed.token)
    return proposed._replace(score=score, token=token), finite, committed, found, end


def predicts_itself(spec: ModelSpec) -> bool:
    """Whether each position's own output predicts it in every step (`Canvas.predictor`)."""
    return not spec.shifted and not spec.causal_context


def _positions(plan: Plan, canvas: Canvas, rows: Rows, verify: bool) -> Int[Array, "b c"]:
    """The positions that are candidates, compacted to a static number: only they meet the vocabulary."""
    policy, sampler, layout = plan.policy, plan.sampler, canvas.layout

    # A position can be predicted if its predictor (with Dream's shifted head, its left neighbour) was
    # computed.
    predicted = rows.mask()
    if not predicts_itself(canvas.spec):
        predicted = jnp.take_along_axis(predicted, canvas.predictor, axis=1)
    rule = sampler.early_commit
    response_scored = "response" in (policy.scored, sampler.scored) or rule is not None
    response_scored |= plan.drafting is not None and plan.drafting.eager
    scored = canvas.masked if response_scored else offered_positions(policy, canvas)
    scored = scored if layout.adaptive is None else scored | in_window(canvas)

    # Masks outside of the block are candidates only if the response is scored, or if earlier blocks were left
    # with masks.
    everywhere = sampler.allow_mask_token or response_scored
    upper_bound = layout.response if everywhere else layout.widest_block
    scored = scored if rule is None else scored | rule.asked(canvas)
    scored = scored | decoded_in_block(canvas) if sampler.edits else scored
    candidates, most = scored & predicted, min(upper_bound, rows.index.shape[1])
    if verify:
        # What is verified is in the shadow, whether or not the step computes it.
        candidates, most = candidates | decoded_in_block(canvas), upper_bound
    return compact(candidates, most)
