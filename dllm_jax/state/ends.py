"""Ends of answers: end-of-text and stops on the canvas."""

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import first_of


def is_one_of(tokens: Int[Array, "..."], ids: tuple[int, ...]) -> Bool[Array, "..."]:
    """The tokens with one of these ids."""
    return functools.reduce(operator.or_, (tokens == i for i in ids))


def first_eos(canvas: Canvas) -> Int[Array, "b"]:
    """Position of the first end-of-text in the response, of a suffix none; l if there is none."""
    hit = is_one_of(canvas.tokens, canvas.spec.ends) & canvas.response & canvas.valid
    if canvas.layout.end < canvas.layout.length:
        hit &= canvas.position < canvas.layout.end
    return first_of(hit, canvas.layout.length)


def answer_end(canvas: Canvas) -> Int[Array, "b"]:
    """Where each answer ends: at the first end-of-text, or at a stop before it; l if there is neither."""
    first = first_eos(canvas)
    return first if canvas.stop is None else jnp.minimum(first, canvas.stop)


def with_stop(canvas: Canvas, tokens: Int[Array, "b l"]) -> Int[Array, "b l"]:
    """The tokens with end-of-text from a stop to the end of the answer."""
    if canvas.stop is None:
        return tokens
    stopped = (canvas.position >= canvas.stop[:, None]) & (canvas.position < canvas.layout.end)
    return jnp.where(stopped, canvas.spec.eos_id, tokens)


def behind_first_eos(canvas: Canvas) -> Bool[Array, "b l"]:
    """Positions after the leftmost end-of-text of the first step that decoded one."""
    # Only decoded ones count: an end-of-text in the prompt is text. Without any, a step after all steps.
    eos = is_one_of(canvas.tokens, canvas.spec.ends) & (canvas.decoded_at >= 0)
    first = jnp.min(jnp.where(eos, canvas.decoded_at, jnp.iinfo(jnp.int32).max), axis=1)

    # Later end-of-texts change nothing, even to the left of the first, as in Elastic-Cache's reference.
    earliest = eos & (canvas.decoded_at == first[:, None])
    return canvas.position > first_of(earliest, canvas.layout.length)[:, None]
