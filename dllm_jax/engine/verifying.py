"""A step that computes the canvas and drafts of the sampler's next steps, and takes all that agree."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.block_schedule import offered_positions
from dllm_jax.engine.branches import Branches
from dllm_jax.engine.drafting import (
    Drafts,
    Predictions,
    Verified,
    accept,
    branch_count,
    by_branch,
    draft,
    drafted_block,
    drafted_width,
)
from dllm_jax.engine.generation import Generation, State
from dllm_jax.engine.network import computed_rows, network
from dllm_jax.engine.propose import propose
from dllm_jax.engine.stats import Record
from dllm_jax.engine.trace import attended
from dllm_jax.engine.widths import Variant
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas, repeat
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, compact_rows, gather, places, spread


def verify_drafts(
    generation: Generation, variant: Variant, state: State, sequences: Int[Array, "b"] | None
) -> tuple[Canvas, Cache, Record, Predictions]:
    """Takes as many steps of the sampler as its drafts foresaw, in one forward pass.

    Args:
      generation: Constants of the loop.
      variant: Kind of step, static.
      state: State before the step.
      sequences: Places of its sequences in the trace; None if they are all.

    Returns:
      The canvas, the cache, the statistics and the predictions after the step.
    """
    canvas, plan, width = state.canvas, generation.plan, variant.width
    count = branch_count(plan, width, canvas.spec)
    drafts = draft(generation, canvas, state.memory, count)

    # The network runs over the canvas and, at the same positions, over the drafts.
    rows = computed_rows(state.need, variant, canvas.spec, plan.policy)
    assert plan.drafting is not None, "drafts"
    widest = drafted_width(plan.policy, canvas.spec, plan.layout, plan.drafting)
    others = branch_rows(rows, state.need, drafts, widest)
    tokens = jax.vmap(others.take, 1, 1)(drafts.tokens()[:, 1:])
    hidden, cache = network(generation, canvas.tokens, canvas, rows, state.cache, Branches(tokens, others))

    # The sampler decides on each; what it would have decided step by step is accepted.
    verified = verify(generation, drafts, rows, others, hidden)
    accepted = accept(generation, canvas, drafts, verified, state.record.logprobs)
    after, last = accepted.canvas, verified.of(accepted.branch)
    memory = Predictions(last.proposal, accepted.branch)
    after = dataclasses.replace(after, forwards=canvas.passes + canvas.active)
    if plan.drafting.eager and canvas.stored is not None:
        # Of a block that a draft has finished no keys and values are stored yet.
        stored = drafted_block(plan.drafting, canvas)[:, 0] + canvas.spec.block_size
        after = dataclasses.replace(after, stored=jnp.where(canvas.active, stored, canvas.stored))

    positions = jnp.sum(canvas.valid) if width is None else width * len(canvas.tokens)
    ran = positions + (count - 1) * (positions if others is rows else others.index.size)
    read = attended(plan.policy, state.cache, canvas, rows)
    record = state.record.add(
        canvas, after, rows.mask(), ran, read, None, last.finite, accepted.proposal, sequences
    )
    assert record.branches is not None, "of a run that drafts"
    computed = record.branches + jnp.sum(drafts.real, axis=1, dtype=jnp.int32)
    record = record._replace(branches=computed, logprobs=accepted.logprobs)
    return after, cache, record, memory


def branch_rows(rows: Rows, need: Bool[Array, "b l"], drafts: Drafts, width: int) -> Rows:
    """Rows of the branches: those of the step, or only those of sequences with drafts where it has more."""
    if rows.index.shape[1] <= width:
        return rows
    return compact_rows(need & jnp.any(drafts.real[:, 1:], axis=1, keepdims=True), width)


def verify(
    generation: Generation, drafts: Drafts, rows: Rows, of_branches: Rows, hidden: Float[Array, "b q_n_w m"]
) -> Verified:
    """Decisions of the sampler on all branches.

    Args:
      generation: Constants of the loop.
      drafts: Branches of the step.
      rows: Computed positions of the canvas, the first branch.
      of_branches: Computed positions of the other ones.
      hidden: Residual stream after the last layer, of the canvas and of one branch after the other.
    """
    plan, canvases, k = generation.plan, drafts.canvases, drafts.real.shape[1]
    (b, q), w, length = rows.index.shape, of_branches.index.shape[1], rows.length

    # All branches in rows of one width, instead of sequences.
    index = jnp.pad(of_branches.index, ((0, 0), (0, q - w)), constant_values=length)
    index = jnp.concatenate([rows.index, *[index] * (k - 1)], axis=1).reshape(b * k, q)
    later = jnp.pad(hidden[:, q:].reshape(b, k - 1, w, -1), ((0, 0), (0, 0), (0, q - w), (0, 0)))
    hidden = jnp.concatenate([hidden[:, None, :q], later], axis=1).reshape(b * k, q, -1)
    noise, allowed = generation.noise, repeat(generation.allowed, k)
    noise = None if noise is None else noise.of_sequences(jnp.repeat(jnp.arange(b), k))
    every = generation._replace(noise=noise, allowed=allowed)

    candidates, finite, _, found, _ = propose(every, canvases, dataclasses.replace(rows, index=index), hidden)
    index, token, score, _ = candidates
    offered = gather(offered_positions(plan.policy, canvases), index)
    masks = candidates._replace(score=jnp.where(offered, score, -jnp.inf))
    masks, _ = plan.sampler.delay(masks, canvases)
    chosen = plan.sampler.transfer(masks, canvases, noise)
    place = places(index, length)
    proposal = Proposal(
        spread(token, place, canvases.spec.mask_id), spread(score.astype(jnp.float32), place, -jnp.inf)
    )
    chosen = spread(chosen & finite[:, None], place, False)
    verified = Verified(chosen, proposal, finite, None if found is None else (found, place))
    return jax.tree.map(lambda a: by_branch(a, k), verified)
