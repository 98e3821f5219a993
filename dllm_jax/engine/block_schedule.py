"""When a sequence or a block is finished: the only place that moves on to the next block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.engine.generation import Feature, Plan
from dllm_jax.options import shown
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.state.canvas import Canvas, end, masks_in_block
from dllm_jax.state.contexts import in_blocks
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import first_of
from dllm_jax.state.sliding import AdaBlock, Sliding
from dllm_jax.xla.reductions import any_marked


def advance(canvas: Canvas, policy: Policy, sampler: Sampler, features: tuple[Feature, ...] = ()) -> Canvas:
    """Moves each sequence on by as many blocks as have nothing to do; what has something to do is active."""
    layout = canvas.layout

    def settle(moving: tuple[Canvas, Bool[Array, "b"], Bool[Array, ""]]):
        # The first round moves nothing, so that the program holds what decides about a block only once.
        canvas, moves, _ = moving
        start = canvas.block_start + layout.moves_by * moves
        if layout.adaptive is not None:
            start = jnp.where(moves, canvas.block_until, canvas.block_start)
        moved = dataclasses.replace(
            canvas.at_block(start),
            block_step=jnp.where(moves, 0, canvas.block_step),
            keeps_block=jax.tree.map(lambda stays: stays & ~moves, canvas.keeps_block),
        )
        if layout.adaptive is not None:
            until = jnp.where(moves, moved.block_until, canvas.block_until)
            moved = dataclasses.replace(moved, block_until=until)
        masks = jnp.where(moves, masks_in_block(moved), canvas.block_masks)
        left = remaining(moved)
        moved = dataclasses.replace(moved, block_masks=masks, active=left)
        active = left & ~block_finished(moved, policy, sampler)
        moves = left & ~active
        return dataclasses.replace(moved, active=active), moves, jnp.any(moves)

    canvas = slid(canvas) if canvas.layout.sliding else canvas
    canvas = at_verified(canvas) if canvas.layout.drafts else canvas

    # Blocks without masks, such as an infilled template may hold, are skipped without a forward.
    for feature in features:
        canvas = feature.finish_sequences(canvas, functools.partial(final, sampler=sampler))
    first = (canvas, jnp.zeros_like(canvas.done), jnp.bool_(True))
    return jax.lax.while_loop(lambda moving: moving[2], settle, first)[0]


def end_step(plan: Plan, canvas: Canvas, finite: Bool[Array, "b"]) -> Canvas:
    """The canvas at the end of a step that has written its tokens, by logits that are finite or not."""
    stays = final(canvas, plan.sampler)
    for feature in plan.acting:
        canvas = feature.look(canvas, stays)

    # A step ends with the guard against NaN, and with what is finished: sequences, blocks.
    # No sampler could finish the block of a sequence that is not finite before the end of its schedule.
    canvas = end(canvas, ~finite | (canvas.step >= plan.step_limit))
    return advance(canvas, plan.policy, plan.sampler, plan.acting)


def slid(canvas: Canvas) -> Canvas:
    """The canvas with its blocks at their first masks, and with new rounds where the last ones are over."""
    layout, masks = canvas.layout, canvas.masked & canvas.response
    first = first_of(masks, layout.end)

    # A round is over when as many tokens have been decoded since its first step as a block has positions.
    began = (canvas.step - canvas.block_step)[:, None]
    over = jnp.sum(canvas.decoded_at >= began, axis=1) >= layout.block
    block_step = jnp.where(over & (canvas.block_step > 0), 0, canvas.block_step)
    return dataclasses.replace(canvas.at_block(first), block_step=block_step)


def at_verified(canvas: Canvas) -> Canvas:
    """The canvas with its blocks at their last verified token, from which the next draft begins."""
    stored = in_blocks(canvas).stored
    moves = stored > canvas.block_start
    start = jnp.where(moves, stored, canvas.block_start)
    return dataclasses.replace(canvas.at_block(start), block_step=jnp.where(moves, 0, canvas.block_step))


def check_schedule(layout: Layout, policy: Policy, sampler: Sampler):
    """Raises ValueError if the block slides and the policy, or the sampler, rests on blocks that stay."""
    if isinstance(layout.schedule, AdaBlock):
        check_adaptive(layout, policy, sampler)
    if not isinstance(layout.schedule, Sliding):
        return
    if not policy.only_sets:
        name = type(policy).__name__
        raise ValueError(
            f"block={layout.sliding!r} is not supported by {name}: it has layers of its own. Use "
            "SlidingCache(), DualCache() or DKVDecode(), "
            f"or an integer block where {name} supports the model."
        )
    if sampler.revises:
        raise ValueError(
            f"block={layout.sliding!r} is not supported by {type(sampler).__name__}: it revises "
            "tokens of the current block. Use an integer block, or Threshold()."
        )


def remaining(canvas: Canvas) -> Bool[Array, "b"]:
    """Sequences that are not done and have a block left, be it the current one."""
    return ~canvas.done & (canvas.block_start < canvas.layout.end)


def slowest(canvas: Canvas) -> Int[Array, ""]:
    """Positions in front of the current block, of the sequences that are least advanced.

    They are counted from the first block, and negative where a prompt's end shares that.
    """
    done = canvas.layout.end - canvas.layout.prompt
    return jnp.min(jnp.where(remaining(canvas), canvas.block_start - canvas.first_block, done))


def block_finished(canvas: Canvas, policy: Policy, sampler: Sampler) -> Bool[Array, "b"]:
    """Sequences whose sampler has finished the block, or whose policy offers nothing after the schedule.

    A block with masks goes on after its schedule if the policy offered fewer positions than the schedule
    wanted; Elastic-Cache may leave masks after an end-of-text for good.
    """
    schedule_over = canvas.schedule_step >= canvas.steps_per_block
    nothing_offered = ~any_marked(offered_positions(policy, canvas))
    return _without_edits(sampler.finished(canvas) | (schedule_over & nothing_offered), canvas)


def offered_positions(policy: Policy, canvas: Canvas) -> Bool[Array, "b l"]:
    """The positions that may be decoded in the coming step: those the policy offers, in front of a stop."""
    return canvas.in_front_of_stop(policy.eligible(canvas))


def final(canvas: Canvas, sampler: Sampler) -> Bool[Array, "b"] | bool:
    """Whether decoded tokens stay: those that may be revoked or edited do when their block is finished."""
    if canvas.layout.drafts:
        return ~canvas.drafted
    if not sampler.revises:
        return True
    # A sequence that the step leaves out may not have finished its block either.
    everyone = dataclasses.replace(canvas, active=jnp.ones_like(canvas.active))
    return _without_edits(sampler.finished(everyone), canvas)


def _without_edits(finished: Bool[Array, "b"], canvas: Canvas) -> Bool[Array, "b"]:
    """Finished sequences whose sampler edits nothing in the block any more."""
    return finished if canvas.keeps_block is None else finished & ~canvas.keeps_block


def check_adaptive(layout: Layout, policy: Policy, sampler: Sampler):
    """Raises ValueError if blocks end at delimiters and the policy, or the sampler, needs to know where."""
    name = f"block={shown(layout.adaptive)} is not supported by"
    if not policy.fixed_within_blocks:
        raise ValueError(
            f"{name} {type(policy).__name__}: the first step of a block must predict every position that may "
            "end it. Use Policy(), PrefixCache() or DualCache()."
        )
    if not sampler.until_done or sampler.revises:
        raise ValueError(
            f"{name} {type(sampler).__name__}: it needs to know how many positions a block has, or revises "
            "them. Use Threshold(), or another sampler that stays until nothing in the block is masked."
        )
