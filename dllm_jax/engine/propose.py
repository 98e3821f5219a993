"""The candidates of a step: which positions meet the vocabulary, and the token and score of each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.adaptive import delimited_end, in_window
from dllm_jax.engine.block_schedule import offered_positions
from dllm_jax.engine.branches import decoded_in_block, place_in_shadow
from dllm_jax.engine.constrain import constrain_logits
from dllm_jax.engine.generation import Generation
from dllm_jax.engine.growth import end_confidence, watched_positions
from dllm_jax.engine.logprobs import LogProbs, of_candidates
from dllm_jax.engine.plan import Plan
from dllm_jax.nn.arithmetic import guided
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.state.canvas import Canvas, repeat, stream
from dllm_jax.state.rows import Rows, compact, gather
from dllm_jax.xla.reductions import any_marked


class Proposed(NamedTuple):
    """The candidates of a step, and what is known of them.

    Attributes:
      candidates: Scored positions whose predictor was computed, with tokens, scores and logits.
      finite: Sequences all of whose logits are finite, and no confidence NaN, which no sampler would decode.
        Those of padding may be anything.
      commits: Sequences that commit to all of their masks now; None without such a rule (`EarlyCommit`).
      logprobs: Log-probabilities of the candidates; None if none are recorded.
      block_end: End of each sequence's block, if the step sets it (`engine.adaptive`); else None.
      end_confidence: Confidence in the end of each answer, if answers grow (`engine.growth`); else None.
    """

    candidates: Candidates
    finite: Bool[Array, "b"]
    commits: Bool[Array, "b"] | None = None
    logprobs: LogProbs | None = None
    block_end: Int[Array, "b"] | None = None
    end_confidence: Float[Array, "b"] | None = None


def propose(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    verifying: Bool[Array, "b"] | None = None,
) -> Proposed:
    """The candidates: each scored position gets its logits, a token and a score.

    Args:
      generation: the constants.
      canvas: state before the step.
      rows: Positions that the conditional stream computed.
      hidden: the residual stream after the last layer, of all streams; after it that of the shadow block, if
        the sampler verifies tokens, which are then candidates too, or a draft.
      verifying: Sequences whose draft is verified (`Canvas.verifying`); None if the sampler makes none.
    """
    plan, sampler, length = generation.plan, generation.plan.sampler, canvas.layout.length
    index = _positions(plan, canvas, rows, verify=sampler.verifies)

    # A token to be verified takes its logits from its shadow: a position is a mask or holds one, never both.
    holds_token = jnp.zeros_like(index, bool)
    if sampler.revises:
        holds_token = gather(decoded_in_block(canvas), index) & (index < length)
    if sampler.grows:
        holds_token = ~gather(canvas.masked, index) & (index < length)
    shadowed = holds_token if sampler.verifies else None
    if verifying is not None and not canvas.spec.shifted:
        shadowed = verifying[:, None]
    unconstrained = _logits(generation, canvas, rows, hidden, index, shadowed)
    logits, waits = constrain_logits(generation, canvas, index, unconstrained)
    proposed = sampler.propose(logits, index, canvas, generation.noise)
    found = None
    if plan.logprobs is not None:
        found = of_candidates(sampler, proposed, logits, canvas, plan.logprobs)

    # No sampler would decode a NaN; what stands at entries that are no candidates may be anything.
    candidate = index < length
    known = ~any_marked(~jnp.isfinite(unconstrained)) & ~jnp.isnan(proposed.score)
    finite = ~any_marked(candidate & ~known)

    # The rule looks at the whole answer; a sampler sees masks, and what it revises.
    commits = None
    if (rule := sampler.early_commit) is not None:
        commits = rule.commits(logits, index, canvas) & finite
        seen = gather(canvas.masked, index) | holds_token
        candidate &= seen
        proposed = proposed._replace(index=jnp.where(seen, index, length))

    # What no token is allowed to waits: it is no candidate of this step, and a token there stays.
    if waits is not None:
        if commits is not None:
            commits &= ~jnp.any(waits & candidate & ~holds_token, axis=1)
        holds_token, candidate = holds_token & ~waits, candidate & ~waits
        proposed = proposed._replace(index=jnp.where(candidate, index, length))

    # What holds a token has no score, and unless it may be edited it is offered no other.
    score = jnp.where(candidate & ~holds_token, proposed.score, -jnp.inf)
    token = proposed.token if sampler.edits else jnp.where(holds_token, canvas.spec.mask_id, proposed.token)
    ends = delimited_end(canvas, index, unconstrained)
    sure = end_confidence(plan, canvas, index, unconstrained)
    return Proposed(proposed._replace(score=score, token=token), finite, commits, found, ends, sure)


def _logits(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    index: Int[Array, "b c"],
    shadowed: Bool[Array, "b #c"] | None,
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
    if shadowed is not None:
        slot = jnp.where(shadowed, rows.index.shape[1] + place_in_shadow(canvas, index), slot)
    logits = unembed(generation.model.params, spec, gather(hidden, repeat(slot, plan.streams)))
    if plan.streams == 1:
        return logits
    conditional, unconditional = (stream(logits.astype(jnp.float32), i, 2) for i in range(2))
    return guided(conditional, unconditional, plan.sampler.cfg_scale)


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
    response_scored |= plan.drafts_eagerly
    scored = canvas.masked if response_scored else offered_positions(policy, canvas)
    scored = scored if layout.adaptive is None else scored | in_window(canvas)
    scored = watched_positions(canvas) if sampler.grows else scored

    # Masks outside of the block are candidates only if the response is scored, or if earlier blocks were left
    # with masks.
    everywhere = sampler.allow_mask_token or response_scored or sampler.grows
    upper_bound = layout.response if everywhere else layout.widest_block
    scored = scored if rule is None else scored | rule.asked(canvas)
    scored = scored | decoded_in_block(canvas) if sampler.edits else scored
    candidates, most = scored & predicted, min(upper_bound, rows.index.shape[1])
    if verify:
        # What is verified is in the shadow, whether or not the step computes it.
        candidates, most = candidates | decoded_in_block(canvas), upper_bound
    return compact(candidates, most)
