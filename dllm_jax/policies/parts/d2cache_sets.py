"""The sets of d2Cache's selection, as pure functions of the canvas and the scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best, certainty_density


def prior(confidence: Float[Array, "b l"], canvas: Canvas, sigma: float) -> Float[Array, "b l"]:
    """Confidence times the density of known tokens around each response position, -inf elsewhere.

    A negative confidence is divided by the density, so that isolated positions rank lower here too.
    """
    prompt = canvas.layout.prompt
    batch = confidence.shape[0]
    index = jnp.broadcast_to(canvas.position[prompt:], (batch, canvas.layout.response))
    density = certainty_density(canvas, index, sigma)
    confidence = confidence[:, prompt:]
    weighed = jnp.where(confidence < 0, confidence / jnp.maximum(density, 1e-30), confidence * density)
    weighed = jnp.where(jnp.isfinite(confidence), weighed, -jnp.inf)
    return jnp.pad(weighed, ((0, 0), (prompt, 0)), constant_values=-jnp.inf)


def search_range(canvas: Canvas, count: Int[Array, "b"]) -> Bool[Array, "b l"]:
    """Everything up to the end of the block with the count-th mask (the last one if there are fewer)."""
    masked = canvas.masked & canvas.response
    prompt, block = canvas.layout.prompt, canvas.layout.block
    among_first = masked & (jnp.cumsum(masked, axis=1) <= count[:, None])
    last = jnp.max(jnp.where(among_first, canvas.position, prompt), axis=1)
    return canvas.position < (prompt + ((last - prompt) // block + 1) * block)[:, None]


def candidates(score: Float[Array, "b l"], canvas: Canvas, k: int) -> Bool[Array, "b l"]:
    """M*: the k masks of the largest score within the search range, those that may be decoded now first.

    More than k where the schedule has to decode more per step to finish the block in time.
    """
    steps_left = jnp.maximum(canvas.layout.steps_per_block - canvas.block_step, 1)
    per_step = -(-jnp.sum(canvas.eligible, axis=1) // steps_left)
    count = jnp.maximum(k, per_step)
    now = best(jnp.where(canvas.eligible, score, -jnp.inf), count)
    later = canvas.masked & search_range(canvas, count) & ~canvas.eligible
    return now | best(jnp.where(later, score, -jnp.inf), count - jnp.sum(now, axis=1))


def inflated(chosen: Bool[Array, "b l"], distance: int) -> Bool[Array, "b l"]:
    """Adds the positions between two neighbours of the set that are at most `distance` apart."""
    if distance == 0:
        return chosen
    length = chosen.shape[1]
    position = jnp.arange(length)
    previous = jax.lax.cummax(jnp.where(chosen, position, -length), axis=1)
    following = jax.lax.cummin(jnp.where(chosen, position, 2 * length), axis=1, reverse=True)
    return following - previous <= distance
