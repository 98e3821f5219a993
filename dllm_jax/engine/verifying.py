"""A step that computes the canvas and drafts of the sampler's next steps, and takes all that agree."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.branches import Branches
from dllm_jax.engine.decide import Decided, decide
from dllm_jax.engine.denoising import denoise_once, executed_positions
from dllm_jax.engine.drafting import (
    Drafts,
    Predictions,
    accept,
    branch_count,
    by_branch,
    draft,
    drafted_block,
    drafted_width,
)
from dllm_jax.engine.generation import Generation, State
from dllm_jax.engine.network import computed_rows, network
from dllm_jax.engine.recorders import Taken
from dllm_jax.engine.trace import attended
from dllm_jax.engine.widths import Variant
from dllm_jax.samplers.candidates import noise_of
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, compact_rows, repeat


def take_drafted_step(
    drafting: Drafting, generation: Generation, variant: Variant, state: State, sequences: Int[Array, "b"]
) -> tuple[Taken, Cache, Predictions]:
    """Takes one step of the sampler, or as many as its drafts foresaw, in one forward pass.

    Args:
      drafting: How steps of the sampler are drafted.
      generation: Constants of the loop.
      variant: Kind of step, static.
      state: State before the step; its memory holds the predictions of the last pass.
      sequences: Places of the sequences in the trace.

    Returns:
      what the step did, the cache, and the predictions after it.
    """
    count = branch_count(drafting, generation.plan, variant, state.canvas.spec)
    if count == 1:
        taken, cache, _ = denoise_once(generation, variant, state._replace(memory=()), sequences)
        proposal = taken.proposal._replace(delayed=None)
        return taken, cache, Predictions(proposal, jnp.zeros_like(state.canvas.step))
    return verify_drafts(drafting, generation, variant, state, sequences, count)


def verify_drafts(
    drafting: Drafting,
    generation: Generation,
    variant: Variant,
    state: State,
    sequences: Int[Array, "b"],
    count: int,
) -> tuple[Taken, Cache, Predictions]:
    """Computes the canvas and `count - 1` drafts of its next steps, and takes those that agree."""
    canvas, plan = state.canvas, generation.plan
    drafts = draft(drafting, generation, canvas, state.memory, count)

    # The network runs over the canvas and, at the same positions, over the drafts.
    rows = computed_rows(state.need, variant, canvas, plan.policy)
    widest = drafted_width(plan.policy, canvas.spec, plan.layout, drafting)
    others = branch_rows(rows, state.need, drafts, widest)
    tokens = jax.vmap(others.take, 1, 1)(drafts.tokens()[:, 1:])
    hidden, cache = network(generation, canvas.tokens, canvas, rows, state.cache, Branches(tokens, others))

    # The sampler decides on each; what it would have decided step by step is accepted.
    verified = verify(generation, drafts, rows, others, hidden)
    kept = {name: state.record[name] for name in verified.found}
    accepted = accept(drafting, generation, canvas, drafts, verified, kept)
    after = stored_eagerly(drafting, canvas, accepted.canvas)
    last = verified.of_branch(accepted.branch)
    positions = executed_positions(variant, canvas)
    taken = Taken(
        sequences=sequences,
        before=canvas,
        after=after,
        left=after,
        computed=rows.mask(),
        executed=positions + (count - 1) * (positions if others is rows else others.index.size),
        read=attended(plan.policy, state.cache, canvas, rows),
        extra=jnp.zeros((len(canvas.tokens), canvas.spec.layers)),
        finite=last.finite,
        proposal=accepted.proposal,
        branches=jnp.sum(drafts.real, axis=1, dtype=jnp.int32),
        kept=accepted.kept,
    )
    return taken, cache, Predictions(last.proposal, accepted.branch)


def stored_eagerly(drafting: Drafting, before: Canvas, after: Canvas) -> Canvas:
    """The canvas after a step; of a block that an eager draft has finished nothing is stored yet."""
    if not drafting.eager:
        return after
    stored = drafted_block(drafting, before)[:, 0] + before.layout.block
    return dataclasses.replace(after, stored=jnp.where(before.active, stored, after.stored))


def branch_rows(rows: Rows, need: Bool[Array, "b l"], drafts: Drafts, width: int) -> Rows:
    """Rows of the branches: those of the step, or only those of sequences with drafts where it has more."""
    if rows.index.shape[1] <= width:
        return rows
    return compact_rows(need & jnp.any(drafts.real[:, 1:], axis=1, keepdims=True), width)


def verify(
    generation: Generation, drafts: Drafts, rows: Rows, of_branches: Rows, hidden: Float[Array, "b q_n_w m"]
) -> Decided:
    """Decisions of the sampler on all branches.

    Args:
      generation: Constants of the loop.
      drafts: Branches of the step.
      rows: Computed positions of the canvas, the first branch.
      of_branches: Computed positions of the other ones.
      hidden: Residual stream after the last layer, of the canvas and of one branch after the other.
    """
    canvases, k = drafts.canvases, drafts.real.shape[1]
    (b, q), w, length = rows.index.shape, of_branches.index.shape[1], rows.length

    # All branches in rows of one width, instead of sequences.
    index = jnp.pad(of_branches.index, ((0, 0), (0, q - w)), constant_values=length)
    index = jnp.concatenate([rows.index, *[index] * (k - 1)], axis=1).reshape(b * k, q)
    later = jnp.pad(hidden[:, q:].reshape(b, k - 1, w, -1), ((0, 0), (0, 0), (0, q - w), (0, 0)))
    hidden = jnp.concatenate([hidden[:, None, :q], later], axis=1).reshape(b * k, q, -1)
    noise = noise_of(generation.noise, jnp.repeat(jnp.arange(b), k))
    every = generation._replace(noise=noise, allowed=repeat(generation.allowed, k))

    # Each branch is the canvas of a sequence of its own.
    decided = decide(every, canvases, dataclasses.replace(rows, index=index), hidden, (), canvases.verifies)
    decided = decided._replace(proposal=decided.proposal._replace(delayed=None))
    return jax.tree.map(lambda a: by_branch(a, k), decided)
