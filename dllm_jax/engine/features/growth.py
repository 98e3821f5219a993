"""Answers that grow (DAEDAL, DreamOn): the end of each is state, the canvas has the largest length.

A step may change the canvas after its tokens are written, by the rule of the sampler
(`GrowingAnswers.resize`): the end moves, a mask becomes several, positions are removed. What is stored of
positions that move is void, by the rule of the policy (`Policy.fixed_within_blocks`).
"""

import dataclasses
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree
from typing_extensions import override

from dllm_jax.engine.block_schedule import advance, offered_positions
from dllm_jax.engine.generation import Feature, Generation, Plan, Seen
from dllm_jax.engine.stats import Record
from dllm_jax.samplers.growing import GrowingAnswers
from dllm_jax.state.cache import Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.growing import GrowingCanvas, growing, growth_of, with_ends
from dllm_jax.state.rows import gather
from dllm_jax.xla.reductions import count_marked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Growing(Feature):
    """Lets answers become longer or shorter by the rule of the sampler, and tells how they did."""

    name: ClassVar[str] = "growth"

    @override
    def find(self, generation: Generation, canvas: Canvas, seen: Seen) -> Float[Array, "b"]:
        """The confidence in the end of each answer."""
        plan, logits = generation.plan, (seen.logits, seen.unconstrained)
        at_end = plan.policy.phases[-1].at_end
        confidence = growing_sampler(plan).end_confidence(seen.candidates, *logits, canvas, at_end)
        return jnp.where(canvas.active, confidence, growth_of(canvas).confidence)

    @override
    def resize(
        self, plan: Plan, before: Canvas, after: Canvas, finding: Float[Array, "b"], proposal: Proposal
    ) -> Canvas:
        """Counts the step, and lets the sampler change the answers by the confidence in their ends."""
        growth = growth_of(before)
        counted = growth._replace(
            confidence=finding,
            source=jnp.broadcast_to(before.position, before.tokens.shape),
            inserted=jnp.full_like(before.step, -1),
            removed=jnp.zeros_like(before.valid),
            positions=growth.positions + before.active * jnp.sum(before.valid, axis=1, dtype=jnp.int32),
        )
        after = dataclasses.replace(growing(after), growth=counted)
        masks = offered_positions(plan.policy, before) & before.masked & ~after.done[:, None]
        score = jnp.where(masks, proposal.score, -jnp.inf)
        resized = growing_sampler(plan).resize(before, after, proposal._replace(score=score))
        # A block may have lost its last masks.
        if not plan.sampler.procedure.shortens:
            return resized
        return advance(resized, plan.policy, plan.sampler, plan.acting)

    @override
    def final_tokens(self, canvas: Canvas, finite: Bool[Array, "b"], tokens: Int[Array, "b l"]):
        """The tokens with end-of-text after the answers."""
        return with_ends(canvas, tokens)

    @override
    def finish(self, record: Record, canvas: Canvas, tokens: Int[Array, "b l"]) -> dict[str, Array]:
        """`Stats.length` and what it came from, which the canvas counts (`state.growing`)."""
        growth = growth_of(canvas)
        counts = {name: getattr(growth, name) for name in ("insertions", "growth_steps", "wanted_more")}
        return counts | {"length": answer_length(canvas), "removed_tokens": growth.removals}


def growing_sampler(plan: Plan) -> GrowingAnswers:
    """The sampler of a plan whose answers grow (`Procedure.grows`)."""
    return cast(GrowingAnswers, plan.sampler)


def answer_length(canvas: Canvas) -> Int[Array, "b"]:
    """Tokens of each answer, or of each template: what exists of it."""
    return count_marked(canvas.valid & canvas.response)


def moved_with(canvas: Canvas, arrays: PyTree, otherwise: PyTree) -> PyTree:
    """Arrays [b l ..] of positions, moved as the last step moved the positions.

    Args:
      canvas: Canvas after the step.
      arrays: Arrays of the positions before it.
      otherwise: The same arrays of positions that hold nothing, read where masks were inserted.
    """
    if not isinstance(canvas, GrowingCanvas):
        return arrays
    new: Bool[Array, "b l"] = canvas.masked | ~canvas.valid
    return jax.tree.map(
        lambda a, none: jnp.where(
            new.reshape(*new.shape, *[1] * (a.ndim - 2)), none, gather(a, canvas.growth.source)
        ),
        arrays,
        otherwise,
    )
