"""When a row or a block is finished, and what comes next: the only place that moves the block window."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.samplers.base import Sampler
from dllm_jax.state.canvas import Canvas, masks_in_block


def advance(canvas: Canvas, sampler: Sampler, stop_at_eos: bool) -> Canvas:
    """Settles who is active, and moves on by as many blocks as have nothing to do."""

    def settle(canvas: Canvas) -> Canvas:
        in_range = canvas.block_start < canvas.layout.length
        idle = dataclasses.replace(canvas, active=~canvas.done & in_range)
        return dataclasses.replace(idle, active=idle.active & ~sampler.finished(idle))

    def next_block(canvas: Canvas) -> Canvas:
        moved = dataclasses.replace(
            canvas,
            block_start=canvas.block_start + canvas.layout.block,
            block_step=jnp.zeros_like(canvas.block_step),
        )
        return settle(dataclasses.replace(moved, block_masks=masks_in_block(moved)))

    if stop_at_eos:
        canvas = dataclasses.replace(canvas, done=canvas.done | ended(canvas))
    return jax.lax.while_loop(
        lambda c: ~jnp.any(c.active) & (c.block_start < c.layout.length), next_block, settle(canvas)
    )


def first_eos(canvas: Canvas) -> Int[Array, "b"]:
    """Position of the first end-of-text in the response, l if there is none."""
    hit = (canvas.tokens == canvas.spec.eos_id) & canvas.response
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), canvas.layout.length).astype(jnp.int32)


def behind_first_eos(canvas: Canvas) -> Bool[Array, "b l"]:
    """Positions behind the leftmost end-of-text of the first step that decoded one."""
    eos = (canvas.tokens == canvas.spec.eos_id) & (canvas.born >= 0)
    first = jnp.min(jnp.where(eos, canvas.born, canvas.layout.steps + canvas.layout.response), axis=1)
    earliest = eos & (canvas.born == first[:, None])
    end = jnp.where(jnp.any(earliest, axis=1), jnp.argmax(earliest, axis=1), canvas.layout.length)
    return canvas.position > end[:, None]


def ended(canvas: Canvas) -> Bool[Array, "b"]:
    """An end-of-text is decoded and nothing before it is masked: the answer cannot change any more."""
    eos = first_eos(canvas)[:, None]
    open_before = jnp.any(canvas.masked & (canvas.position < eos), axis=1)
    return (eos[:, 0] < canvas.layout.length) & ~open_before
