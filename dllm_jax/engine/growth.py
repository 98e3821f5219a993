"""Answers that grow (DAEDAL, DreamOn): the end of each is state, the canvas has the largest length.

A step may change the canvas after its tokens are written, by the rule of the sampler (`Sampler.resize`):
the end moves, a mask becomes several, positions are removed. What is stored of positions that move is void,
by the rule of the policy (`Policy.fixed_within_blocks`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.block_schedule import advance, offered_positions
from dllm_jax.engine.generation import Plan
from dllm_jax.samplers.candidates import Candidates
from dllm_jax.state.cache import Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.growing import GrowingCanvas, growing, growth_of
from dllm_jax.state.rows import gather
from dllm_jax.xla.reductions import count_marked


def end_confidence(
    plan: Plan,
    canvas: Canvas,
    candidates: Candidates,
    logits: Float[Array, "b c v"],
    unconstrained: Float[Array, "b c v"],
) -> Float[Array, "b"]:
    """The confidence in the end of each answer; 0 unless answers grow.

    Args:
      plan: Options of the run.
      canvas: Canvas before the step.
      candidates: Candidates of the step.
      logits: Logits that they were chosen by.
      unconstrained: Those of the model, before constraints.
    """
    if not isinstance(canvas, GrowingCanvas):
        return jnp.zeros(canvas.step.shape)
    found = plan.sampler.end_confidence(
        candidates, logits, unconstrained, canvas, plan.policy.phases[-1].at_end
    )
    return jnp.where(canvas.active, found, canvas.growth.confidence)


def grow(
    plan: Plan, before: Canvas, after: Canvas, confidence: Float[Array, "b"], proposal: Proposal
) -> Canvas:
    """The canvas after a step, in which answers have become longer or shorter.

    Args:
      plan: Options of the run.
      before: Canvas before the step.
      after: Canvas with the step's tokens.
      confidence: Confidence in the end of each answer.
      proposal: Candidates of the step.
    """
    growth = growth_of(before)
    counted = growth._replace(
        confidence=confidence,
        source=jnp.broadcast_to(before.position, before.tokens.shape),
        inserted=jnp.full_like(before.step, -1),
        removed=jnp.zeros_like(before.valid),
        positions=growth.positions + before.active * jnp.sum(before.valid, axis=1, dtype=jnp.int32),
    )
    after = dataclasses.replace(growing(after), growth=counted)
    masks = offered_positions(plan.policy, before) & before.masked & ~after.done[:, None]
    score = jnp.where(masks, proposal.score, -jnp.inf)
    resized = plan.sampler.resize(before, after, proposal._replace(score=score))
    if not plan.sampler.shortens:
        return resized
    # A block may have lost its last masks.
    return advance(resized, plan.policy, plan.sampler, plan.stop_at_eos)


def answer_length(canvas: Canvas) -> Int[Array, "b"]:
    """Tokens of each answer, or of each template: what exists of it."""
    return count_marked(canvas.valid & canvas.response)


def moved_with(canvas: Canvas, kept: PyTree, otherwise: PyTree) -> PyTree:
    """Arrays [b l ..] of positions, moved as the last step moved the positions.

    Args:
      canvas: Canvas after the step.
      kept: Arrays of the positions before it.
      otherwise: The same arrays of positions that hold nothing, read where masks were inserted.
    """
    if not isinstance(canvas, GrowingCanvas):
        return kept
    new: Bool[Array, "b l"] = canvas.masked | ~canvas.valid
    return jax.tree.map(
        lambda a, none: jnp.where(
            new.reshape(*new.shape, *[1] * (a.ndim - 2)), none, gather(a, canvas.growth.source)
        ),
        kept,
        otherwise,
    )
