"""Changes of the canvas that steps make: what is decoded, masked again, counted, or finished."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.state.canvas import Canvas


def write(canvas: Canvas, chosen: Bool[Array, "b l"], token: Int[Array, "b l"]) -> Canvas:
    """Decodes the chosen positions; active sequences count one more step."""
    # A sequence that a step leaves out counts no step: its refreshes and draws are what they are alone.
    took_part = canvas.active.astype(jnp.int32)
    return dataclasses.replace(
        canvas,
        tokens=jnp.where(chosen, token, canvas.tokens),
        decoded_at=jnp.where(chosen, canvas.step[:, None], canvas.decoded_at),
        step=canvas.step + took_part,
        block_step=canvas.block_step + took_part,
        stored=canvas._stored_after(chosen),
    )


def revoke(canvas: Canvas, revoked: Bool[Array, "b l"]) -> Canvas:
    """Masks these decoded positions again."""
    return dataclasses.replace(
        canvas,
        tokens=jnp.where(revoked, canvas.spec.mask_id, canvas.tokens),
        decoded_at=jnp.where(revoked, -1, canvas.decoded_at),
    )


def count_forward(canvas: Canvas, before: Canvas) -> Canvas:
    """The canvas after a forward pass of the sequences that were active before; `write` counts steps."""
    counted = jax.tree.map(lambda forwards: forwards + before.active, before.forwards)
    return dataclasses.replace(canvas, forwards=counted)


def keep_block(canvas: Canvas, stays: Bool[Array, "b"]) -> Canvas:
    """Sequences stay in their block while its tokens are edited, or may leave it."""
    if canvas.keeps_block is None:
        return canvas
    return dataclasses.replace(canvas, keeps_block=jnp.where(canvas.active, stays, canvas.keeps_block))


def end(canvas: Canvas, ends: Bool[Array, "b"]) -> Canvas:
    """Finishes these sequences."""
    return dataclasses.replace(canvas, done=canvas.done | ends)
