"""The decision of a step: candidates meet the vocabulary, and the sampler chooses among them.

The step of a canvas and the verification of drafts decide by the same function: each draft is then the canvas
of a sequence of its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.block_schedule import end_step, offered_positions
from dllm_jax.engine.generation import Generation
from dllm_jax.engine.logprobs import LogProbs
from dllm_jax.engine.plan import Plan
from dllm_jax.engine.propose import Proposed, propose
from dllm_jax.samplers.candidates import Decision
from dllm_jax.state.canvas import Canvas, end, keep_block, revoke, write
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, gather, places, spread


class Decided(NamedTuple):
    """Changes of a step to the canvas; of a step with drafts, [b k ..] for k canvases of each sequence.

    Attributes:
      chosen: Positions that are unmasked, or get another token.
      proposal: Token and score of every position.
      finite: Sequences whose logits are finite.
      remasked: Positions that become masks again; None if the sampler takes nothing back.
      stays: Sequences that stay in their block even if nothing in it is masked; None if it edits nothing.
      ends: Sequences whose answer is settled; None without such a rule.
      block_end: End of each sequence's block, if the step sets it; else None.
      end_confidence: Confidence in the end of each answer, if answers grow; else None.
      memory: State that the sampler keeps.
      found: Log-probabilities of the candidates [b c ..] and the place of each position among them; None if
        none are recorded.
    """

    chosen: Bool[Array, "b l"]
    proposal: Proposal
    finite: Bool[Array, "b"]
    remasked: Bool[Array, "b l"] | None = None
    stays: Bool[Array, "b"] | None = None
    ends: Bool[Array, "b"] | None = None
    block_end: Int[Array, "b"] | None = None
    end_confidence: Float[Array, "b"] | None = None
    memory: PyTree = ()
    found: tuple[LogProbs, Int[Array, "b l"]] | None = None

    def of_branch(self, branch: Int[Array, "b"]) -> "Decided":
        """The decision on one of the canvases of each sequence."""
        return jax.tree.map(lambda a: a[jnp.arange(len(branch)), branch], self)

    def added_to(self, logprobs: LogProbs | None, before: Canvas, after: Canvas) -> LogProbs | None:
        """The recorded log-probabilities with those of the step; None if none are recorded."""
        if logprobs is None or self.found is None:
            return logprobs
        return logprobs.add(before, after, *self.found)


def decide(
    generation: Generation,
    canvas: Canvas,
    rows: Rows,
    hidden: Float[Array, "streams_b q m"],
    memory: PyTree,
    verifying: Bool[Array, "b"] | None = None,
) -> Decided:
    """Decides which candidates are unmasked, and what else changes.

    Args:
      generation: Constants of the loop.
      canvas: Canvas before the step.
      rows: Positions that have an output.
      hidden: Residual stream after the last layer (`propose`).
      memory: State that the sampler kept of the last step.
      verifying: Sequences whose draft is verified; None if the sampler makes none.
    """
    proposed = propose(generation, canvas, rows, hidden, verifying)
    canvas = canvas.ending_block(proposed.block_end)
    index, token, score, _ = proposed.candidates
    offered = gather(offered_positions(generation.plan.policy, canvas), index)
    masks = proposed.candidates._replace(score=jnp.where(offered, score, -jnp.inf))
    masks, delayed = generation.plan.sampler.delay(masks, canvas)
    decision = generation.plan.sampler.decide(masks, memory, canvas, generation.noise)
    decision = commit(decision, proposed) if proposed.commits is not None else decision

    # From candidates to the canvas.
    place = places(index, canvas.layout.length)
    token = token if decision.token is None else decision.token
    proposal = Proposal(
        spread(token, place, canvas.spec.mask_id),
        spread(score.astype(jnp.float32), place, -jnp.inf),
        jax.tree.map(lambda marked: spread(marked, place, False), delayed),
    )
    on_canvas = functools.partial(marked_on_canvas, finite=proposed.finite, place=place)
    return Decided(
        chosen=on_canvas(decision.chosen),
        proposal=proposal,
        finite=proposed.finite,
        remasked=jax.tree.map(on_canvas, decision.revoked),
        stays=decision.keeps_block,
        ends=proposed.commits,
        block_end=proposed.block_end,
        end_confidence=proposed.end_confidence,
        memory=decision.memory,
        found=None if proposed.logprobs is None else (proposed.logprobs, place),
    )


def commit(decision: Decision, proposed: Proposed) -> Decision:
    """The decision with all masks of the sequences that commit to their answer (`EarlyCommit`)."""
    assert proposed.commits is not None, "a rule"
    commits = proposed.commits[:, None]
    chosen = decision.chosen | (commits & (proposed.candidates.score > -jnp.inf))
    revoked = None if decision.revoked is None else decision.revoked & ~commits
    return decision._replace(chosen=chosen, revoked=revoked)


def marked_on_canvas(
    marked: Bool[Array, "b c"], finite: Bool[Array, "b"], place: Int[Array, "b l"]
) -> Bool[Array, "b l"]:
    """Canvas positions of the marked candidates, in sequences whose logits are finite."""
    return spread(marked & finite[:, None], place, False)


def apply(plan: Plan, canvas: Canvas, decided: Decided) -> Canvas:
    """The canvas after a step: tokens are written, then blocks and sequences end that are finished."""
    canvas = canvas.ending_block(decided.block_end)
    after = write(canvas, decided.chosen, decided.proposal.token)
    after = after if decided.remasked is None else revoke(after, decided.remasked)
    after = after if decided.stays is None else keep_block(after, decided.stays)
    after = after if decided.ends is None else end(after, decided.ends)
    return end_step(plan, after, decided.finite)
