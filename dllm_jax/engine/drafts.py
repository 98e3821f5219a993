"""Drafts of the sampler's next steps, and their acceptance (FreeDave, arXiv:2510.00294).

    D[0] = the canvas, of which every token is certain
    D[j] = the sampler's step from D[j-1] by what the last forward pass predicts
    one forward pass over all D (engine.branches);  T[j] = the sampler's step from D[j] by its own outputs
    b = 0; while some later D[j] equals T[b]: b = j
    the canvas is T[b], and D[b]'s outputs are the predictions

T[0] is what the sampler makes of the canvas, and so are all T on the chain. A step that a draft skips over
ends as any other: with the block, the stop and the statistics that follow from it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.block_schedule import end_step, offered_positions
from dllm_jax.engine.branches import Branches, drafted_block, goes_on
from dllm_jax.engine.decide import apply, decide
from dllm_jax.engine.generation import Generation, Plan, State, StepDecision, StepRecord
from dllm_jax.engine.stats import Record
from dllm_jax.engine.step import attended, computed_rows, denoise_once, executed_positions, network
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.candidates import Candidates, noise_of
from dllm_jax.samplers.free_dave import Drafting
from dllm_jax.state.cache import Cache, Proposal
from dllm_jax.state.canvas import Canvas, write
from dllm_jax.state.contexts import in_blocks
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, compact, compact_rows, gather, places, repeat, spread

# -- drafts and their acceptance -------------------------------------------------------------------


class Predictions(NamedTuple):
    """Predictions of the last forward pass for masks that are left, the sampler's memory while it drafts.

    Attributes:
      proposal: Candidates of the accepted branch.
      accepted: Index of that branch.
    """

    proposal: Proposal
    accepted: Int[Array, "b"]

    @staticmethod
    def none(canvas: Canvas) -> "Predictions":
        """Nothing is predicted before the first step."""
        token = jnp.full_like(canvas.tokens, canvas.spec.mask_id)
        proposal = Proposal(token, jnp.full(token.shape, -jnp.inf, jnp.float32))
        return Predictions(proposal, jnp.zeros_like(canvas.step))


class Drafts(NamedTuple):
    """Branches of a step: the canvas of each sequence, and drafts after it.

    Attributes:
      canvases: Branch after branch of each sequence.
      real: Whether a branch is computed for anything.
    """

    canvases: Canvas
    real: Bool[Array, "b k"]

    def tokens(self) -> Int[Array, "b k l"]:
        """Token buffers of the branches."""
        return by_branch(self.canvases.tokens, self.real.shape[1])


class DraftResult(NamedTuple):
    """Result of a forward pass: steps of the sampler that its drafts foresaw.

    Attributes:
      canvas: Canvas after the steps.
      branch: Branch of the last of them.
      proposal: Candidates of each position in the step that unmasked it, or else in the last step.
      record: What features keep so far.
    """

    canvas: Canvas
    branch: Int[Array, "b"]
    proposal: Proposal
    record: Record


def branch_count(drafting: Drafting, plan: Plan, variant: Variant, spec: ModelSpec) -> int:
    """Number of branches of a step: one where none of its sequences has predictions (static)."""
    full = drafted_width(plan.policy, spec, plan.layout, drafting) >= plan.layout.length
    return drafting.branches if full or not variant.is_full else 1


def drafted_width(policy: Policy, spec: ModelSpec, layout: Layout, drafting: Drafting) -> int:
    """Upper bound of the positions that a step computes of a sequence that has predictions."""
    if not policy.stores(spec):
        return layout.length
    if size := layout.fitted(spec).context.size:
        return min((1 + drafting.further(layout)) * size, layout.length)
    return min(max(policy.widths(spec, layout), default=layout.length), layout.length)


def drafting_widths(policy: Policy, spec: ModelSpec, layout: Layout, drafting: Drafting) -> set[int]:
    """Widths that steps need besides those of a run that drafts nothing."""
    widths = {drafted_width(policy, spec, layout, drafting)} if policy.stores(spec) else set()
    if drafting.eager:
        widths |= {max(widths) + layout.block}  # with the finished block
    return {width for width in widths if width < layout.length}


def draft(
    drafting: Drafting, generation: Generation, canvas: Canvas, predictions: Predictions, branches: int
) -> Drafts:
    """The branches of a step.

    Args:
      drafting: How steps are drafted.
      generation: Constants of the loop.
      canvas: Canvas before the step.
      predictions: Predictions of the last forward pass.
      branches: Number of branches, that of the canvas included.
    """
    plan, noise = generation.plan, generation.noise
    token, score, _ = predictions.proposal
    unknown = canvas.block_begins
    if canvas.spec.context.has_causal_passes:
        unknown |= canvas.causal
    elif canvas.spec.context.has_blocks:
        enters = canvas.enters_model_block
        unknown = enters & ~goes_on(canvas) if drafting.eager else enters | unknown
    score = jnp.where(unknown, -jnp.inf, score)
    reach = drafting.further(plan.layout) * plan.layout.block
    last = drafted_block(drafting, canvas)[:, 0] + reach
    most = min(plan.layout.widest_block + reach, plan.layout.response)
    finite = jnp.ones_like(canvas.done)

    def following(before: tuple[Canvas, Bool[Array, "b"]], _):
        drafted, real = before
        known = offered_positions(plan.policy, drafted) & (score > -jnp.inf)
        index = compact(known, most)
        scored = jnp.where(index < canvas.layout.length, gather(score, index), -jnp.inf)
        candidates = Candidates(index, gather(token, index), scored, jnp.zeros((*index.shape, 0)))
        if (order := plan.sampler.planned(drafted, noise)) is None:
            candidates, _ = plan.sampler.delay(candidates, drafted)
            place = places(index, canvas.layout.length)
            chosen = spread(plan.sampler.transfer(candidates, drafted, noise), place, False)
        else:
            chosen = known & (order >= 0)
        after = end_step(plan, write(drafted, chosen, token), finite)
        real &= after.active & (after.block_start <= last) & jnp.any(after.tokens != drafted.tokens, axis=1)
        return (after, real), (jax.tree.leaves(after), real)

    _, (further, real) = jax.lax.scan(following, (canvas, canvas.active), length=branches - 1)
    beside = lambda array, more: jnp.concatenate([array[:, None], jnp.moveaxis(more, 0, 1)], axis=1)
    flat = lambda array, more: beside(array, more).reshape(-1, *array.shape[1:])
    leaves, structure = jax.tree.flatten(canvas)
    canvases = jax.tree.unflatten(structure, map(flat, leaves, further))
    return Drafts(canvases, beside(canvas.active, real))


def accept(
    drafting: Drafting,
    generation: Generation,
    canvas: Canvas,
    drafts: Drafts,
    verified: StepDecision,
    record: Record,
) -> DraftResult:
    """Follows the chain of drafts that are the steps of the sampler.

    Args:
      drafting: How steps are drafted.
      generation: Constants of the loop.
      canvas: Canvas before the step.
      drafts: Branches of the step.
      verified: Decisions on them, [b k ..].
      record: What features keep so far.
    """
    plan, batch = generation.plan, jnp.arange(len(canvas.step))
    tokens = drafts.tokens()
    reached = jnp.where(verified.chosen, verified.proposal.token, tokens)[:, :, None]
    agrees = reached == tokens[:, None]
    if drafting.subset:
        agrees |= canvas.spec.undecided(tokens)[:, None]
    branch = jnp.arange(drafting.branches)
    follows = branch > branch[:, None] if drafting.skips or drafting.subset else branch == branch[:, None] + 1
    agrees = jnp.all(agrees, axis=3) & follows & drafts.real[:, None]

    def take_step(before: Canvas, at: Int[Array, "b"], record: Record) -> tuple[Canvas, Record]:
        decided = verified.of_branch(at)
        after = apply(plan, before, decided)
        return after, decided.added_to(plan, record, before, after)

    def following(chain: DraftResult) -> tuple[Int[Array, "b"], Bool[Array, "b"]]:
        # A subset may be accepted of a step that has finished the sequence, as in the reference.
        fits = agrees[batch, chain.branch]
        fits = fits if drafting.subset else fits & chain.canvas.active[:, None]
        return jnp.max(jnp.where(fits, branch, 0), axis=1), jnp.any(fits, axis=1)

    def follow(chain: DraftResult) -> DraftResult:
        at, continues = following(chain)
        before = chain.canvas
        if drafting.subset:  # what the draft has not is a mask again
            before = jax.tree.map(lambda a: by_branch(a, drafting.branches)[batch, at], drafts.canvases)
        after, record = take_step(before, at, chain.record)
        earlier = before.tokens != canvas.tokens
        keep = lambda new, old: jnp.where(earlier, old, new)
        proposal = jax.tree.map(keep, verified.of_branch(at).proposal, chain.proposal)
        choose = lambda new, old: jnp.where(continues.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        return jax.tree.map(choose, DraftResult(after, at, proposal, record), chain)

    first = jnp.zeros_like(canvas.step)
    after, record = take_step(canvas, first, record)
    chain = DraftResult(after, first, verified.of_branch(first).proposal, record)
    return jax.lax.while_loop(lambda chain: jnp.any(following(chain)[1]), follow, chain)


def by_branch(array: Array, branches: int) -> Array:
    """An array of all branches [b k ..], from one with a branch in place of a sequence."""
    return array.reshape(len(array) // branches, branches, *array.shape[1:])


def check_drafting(drafting: Drafting, policy: Policy, spec: ModelSpec, layout: Layout):
    """Raises ValueError for a run whose steps cannot be drafted, or not over further blocks."""
    if not policy.fixed_within_blocks:
        raise ValueError(
            f"policy={policy!r} is not supported by FreeDave: drafts share keys and values that change only "
            "when a block begins (Policy.fixed_within_blocks). Use Policy(), PrefixCache() or DualCache()."
        )
    if layout.schedule:
        raise ValueError(
            f"block={layout.schedule!r} is not supported by FreeDave: drafts share keys and values outside "
            "of a block that stays. Use an integer block."
        )
    if not drafting.eager:
        return
    for unsupported, what in (
        (not spec.context.has_blocks, "attends to later blocks"),
        (spec.context.has_causal_passes, "has a causal context"),
        (spec.shifted, "has a shifted output head"),
    ):
        if unsupported:
            raise ValueError(
                f"eager=True is not supported by {spec.family}: it {what}, and a branch of "
                "further blocks would not be what later steps compute. Use eager=False."
            )
    if layout.block != spec.context.size:
        raise ValueError(
            f"block={layout.block} is not supported with eager=True: drafts reach into further blocks of the "
            f"model. Use block={spec.context.size}."
        )


# -- a step that computes drafts too, and verifies them --------------------------------------------


def take_drafted_step(
    drafting: Drafting, generation: Generation, variant: Variant, state: State, sequences: Int[Array, "b"]
) -> tuple[StepRecord, Cache, Record]:
    """Takes one step of the sampler, or as many as its drafts foresaw, in one forward pass.

    Args:
      drafting: How steps of the sampler are drafted.
      generation: Constants of the loop.
      variant: Kind of step, static.
      state: State before the step; its memory holds the predictions of the last pass.
      sequences: Places of the sequences in the trace.

    Returns:
      what the step did, with the predictions after it, the cache, and what features keep of it.
    """
    count = branch_count(drafting, generation.plan, variant, state.canvas.spec)
    if count == 1:
        step, cache, entries = denoise_once(generation, variant, state._replace(memory=()), sequences)
        proposal = step.decided.proposal._replace(delayed=None)
        memory = Predictions(proposal, jnp.zeros_like(state.canvas.step))
        return step._replace(decided=step.decided._replace(memory=memory)), cache, entries
    return verify_drafts(drafting, generation, variant, state, sequences, count)


def verify_drafts(
    drafting: Drafting,
    generation: Generation,
    variant: Variant,
    state: State,
    sequences: Int[Array, "b"],
    count: int,
) -> tuple[StepRecord, Cache, Record]:
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
    record = {feature.name: state.record[feature.name] for feature in plan.acting if feature.keeps_steps}
    accepted = accept(drafting, generation, canvas, drafts, verified, record)
    after = stored_eagerly(drafting, canvas, accepted.canvas)
    last = verified.of_branch(accepted.branch)
    memory = Predictions(last.proposal, accepted.branch)
    positions = executed_positions(variant, canvas)
    step = StepRecord(
        sequences=sequences,
        before=canvas,
        after=after,
        left=after,
        computed=rows.mask(),
        executed=positions + (count - 1) * (positions if others is rows else others.index.size),
        attended=lambda: attended(plan.policy, state.cache, canvas, rows),
        extra=jnp.zeros((len(canvas.tokens), canvas.spec.layers)),
        decided=last._replace(proposal=accepted.proposal, memory=memory),
        branches=jnp.sum(drafts.real, axis=1, dtype=jnp.int32),
    )
    return step, cache, accepted.record


def stored_eagerly(drafting: Drafting, before: Canvas, after: Canvas) -> Canvas:
    """The canvas after a step; of a block that an eager draft has finished nothing is stored yet."""
    if not drafting.eager:
        return after
    stored = drafted_block(drafting, before)[:, 0] + before.layout.block
    after = in_blocks(after)
    return dataclasses.replace(after, stored=jnp.where(before.active, stored, after.stored))


def branch_rows(rows: Rows, need: Bool[Array, "b l"], drafts: Drafts, width: int) -> Rows:
    """Rows of the branches: those of the step, or only those of sequences with drafts where it has more."""
    if rows.index.shape[1] <= width:
        return rows
    return compact_rows(need & jnp.any(drafts.real[:, 1:], axis=1, keepdims=True), width)


def verify(
    generation: Generation, drafts: Drafts, rows: Rows, of_branches: Rows, hidden: Float[Array, "b q_n_w m"]
) -> StepDecision:
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
