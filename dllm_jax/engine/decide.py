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

from dllm_jax.engine.block_schedule import end_step, offered_positions
from dllm_jax.engine.generation import Generation, Plan
from dllm_jax.engine.logprobs import LogProbs
from dllm_jax.engine.propose import propose
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.changes import end, write
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, gather, places, spread


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
    canvas = canvas.ending_block(proposed.block_end)
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
        memory=decision.memory,
        found=jax.tree.map(lambda values: gather(values, place), proposed.found),
        block_end=proposed.block_end,
        end_confidence=proposed.end_confidence,
    )


def marked_on_canvas(
    marked: Bool[Array, "b c"], finite: Bool[Array, "b"], place: Int[Array, "b l"]
) -> Bool[Array, "b l"]:
    """Canvas positions of the marked candidates, in sequences whose logits are finite."""
    return spread(marked & finite[:, None], place, False)


def apply(plan: Plan, canvas: Canvas, decided: Decided) -> Canvas:
    """The canvas after a step: tokens are written, then blocks and sequences end that are finished."""
    canvas = canvas.ending_block(decided.block_end)
    after = write(canvas, decided.chosen, decided.proposal.token)
    for change in decided.changes:
        after = change(after)
    return end_step(plan, after, decided.finite)
