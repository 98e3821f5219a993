"""When a sequence or a block is finished: the only place that moves on to the next block."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.state.canvas import Canvas, first_eos, masks_in_block


def advance(canvas: Canvas, policy: Policy, sampler: Sampler, stop_at_eos: bool) -> Canvas:
    """Settles which sequences are active, and moves on by as many blocks as have nothing to do."""

    def settle(canvas: Canvas) -> Canvas:
        in_range = canvas.block_start < canvas.layout.length
        canvas = dataclasses.replace(canvas, active=~canvas.done & in_range)
        return dataclasses.replace(canvas, active=canvas.active & ~block_finished(canvas, policy, sampler))

    def next_block(canvas: Canvas) -> Canvas:
        moved = dataclasses.replace(
            canvas,
            block_start=canvas.block_start + canvas.layout.block,
            block_step=jnp.zeros_like(canvas.block_step),
        )
        return settle(dataclasses.replace(moved, block_masks=masks_in_block(moved)))

    # Blocks without masks, such as an infilled template may hold, are skipped without a forward.
    if stop_at_eos:
        # Tokens that may be revoked are final when their block is finished.
        final = sampler.finished(canvas) if sampler.verifies else True
        canvas = dataclasses.replace(canvas, done=canvas.done | (ended(canvas) & final))
    return jax.lax.while_loop(
        lambda c: ~jnp.any(c.active) & (c.block_start < c.layout.length), next_block, settle(canvas)
    )


def block_finished(canvas: Canvas, policy: Policy, sampler: Sampler) -> Bool[Array, "b"]:
    """Sequences whose sampler has finished the block, or whose policy offers nothing after the schedule.

    A block with masks goes on after its schedule if the policy offered fewer positions than the schedule
    wanted; Elastic-Cache may leave masks behind an end-of-text for good.
    """
    schedule_over = canvas.block_step >= canvas.layout.steps_per_block
    nothing_offered = ~jnp.any(policy.eligible(canvas), axis=1)
    return sampler.finished(canvas) | (schedule_over & nothing_offered)


def ended(canvas: Canvas) -> Bool[Array, "b"]:
    """Sequences that cannot change any more: an end-of-text is decoded and nothing before it is masked."""
    eos = first_eos(canvas)[:, None]
    open_before = jnp.any(canvas.masked & (canvas.position < eos), axis=1)
    return (eos[:, 0] < canvas.layout.length) & ~open_before
