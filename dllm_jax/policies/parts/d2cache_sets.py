"""The sets of d2Cache's selection, as pure functions of the canvas and the scores."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.options import LARGEST
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best, certainty_density
from dllm_jax.traced import Count, Number, fixed_at
from dllm_jax.xla.reductions import count_marked


class Salience(NamedTuple):
    """Statistics that decide which positions the next step computes.

    Attributes:
      confidence: the sampler's, from the last step that computed the position while masked; -inf if none did,
        or no token was allowed there.
      influence: column sums of the last step's attention rollout.
      rolled: computed rows of the rollout matrix, [b q l] during a step and () between steps.
    """

    confidence: Float[Array, "b l"]
    influence: Float[Array, "b l"]
    rolled: PyTree


def prior(confidence: Float[Array, "b l"], canvas: Canvas, sigma: Number) -> Float[Array, "b l"]:
    """Confidence times the density of known tokens around each response position (section 4.1).

    Elsewhere it is -inf. A negative confidence is divided by the density, so that isolated positions rank
    lower here too.

    Args:
      confidence: the sampler's, -inf where no step computed the position while it was masked.
      canvas: state before the step.
      sigma: width of the density's Gaussian, in positions.
    """
    # The density is of the response alone: the prompt counts as known tokens, however long it is.
    prompt = canvas.layout.prompt
    batch = confidence.shape[0]
    index = jnp.broadcast_to(canvas.position[prompt:], (batch, canvas.layout.response))
    density = certainty_density(canvas, index, sigma)

    # Scores of "entropy" are negative. Far from known tokens the density underflows to 0.
    confidence = confidence[:, prompt:]
    weighed = jnp.where(confidence < 0, confidence / jnp.maximum(density, 1e-30), confidence * density)

    # Positions without a confidence stay without, also where the density is 0 and the product NaN.
    weighed = jnp.where(jnp.isfinite(confidence), weighed, -jnp.inf)
    return jnp.pad(weighed, ((0, 0), (prompt, 0)), constant_values=-jnp.inf)


def search_range(canvas: Canvas, count: Int[Array, "b"]) -> Bool[Array, "b l"]:
    """Everything up to the end of the block that holds the count-th mask from the left.

    Of a sequence with fewer masks it is the block of the last one.
    """
    # The rightmost of the first `count` masks decides; without any, the first block.
    masked = canvas.masked & canvas.response
    first, block = canvas.first_block, canvas.layout.block
    among_first = masked & (jnp.cumsum(masked, axis=1) <= count[:, None])
    last = jnp.max(jnp.where(among_first, canvas.position, first[:, None]), axis=1)
    return canvas.position < (first + ((last - first) // block + 1) * block)[:, None]


def expected_masks(score: Float[Array, "b l"], canvas: Canvas, k: Count) -> Bool[Array, "b l"]:
    """M*: the k masks of largest score within the search range, those of the current block first.

    There are more than k where the schedule has to decode more per step to finish the block in time.

    Args:
      score: certainty prior of each position, -inf where there is none.
      canvas: state before the step.
      k: masks per step.
    """
    # What is left of the block, spread over its remaining steps and rounded up.
    steps_left = jnp.maximum(canvas.steps_per_block - canvas.block_step, 1)
    per_step = -(-count_marked(canvas.eligible) // steps_left)
    count = jnp.maximum(k, per_step)

    # Eligible masks go first, at any score of the others (the released code adds the largest score to
    # them).
    # Masks without a confidence come last: they waited for others to be allowed a token.
    now = best(jnp.where(canvas.eligible, jnp.maximum(score, -LARGEST), -jnp.inf), count)
    later = canvas.masked & search_range(canvas, count) & ~canvas.eligible
    return now | best(jnp.where(later, score, -jnp.inf), count - count_marked(now))


def inflated(chosen: Bool[Array, "b l"], distance: Count) -> Bool[Array, "b l"]:
    """The set, and the positions between two neighbours of it that are at most `distance` apart."""
    if fixed_at(distance, 0):
        return chosen

    # Nearest members on either side, the position itself counting as both. Sentinels outside of the canvas
    # make every gap to a missing neighbour longer than the canvas.
    length = chosen.shape[1]
    position, distance = jnp.arange(length), jnp.minimum(distance, length)
    previous = jax.lax.cummax(jnp.where(chosen, position, -distance - 1), axis=1)
    following = jax.lax.cummin(jnp.where(chosen, position, length + distance), axis=1, reverse=True)
    return following - previous <= distance
