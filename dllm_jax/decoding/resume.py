"""The denoising loop in pieces: a program that begins a generation, and one that goes on for some steps.

The second is the loop of `loop.py` with one more condition to stop on: the end of a block, or a number of
steps, which is an argument, so that one compiled program serves pieces of all lengths. What the loop carries
from piece to piece stays on the devices and is donated to the next one, which writes the cache in place.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.decoding.loop import finished, run, unfinished
from dllm_jax.decoding.plan import Plan
from dllm_jax.decoding.stats import Stats
from dllm_jax.decoding.step import State, initial, split_cache
from dllm_jax.nn.mesh import constrain, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.samplers.noise import Noise
from dllm_jax.state.layout import Layout


class Piece(NamedTuple):
    """What the host looks at after some steps.

    Attributes:
      tokens: after them; those of the finished generation after the last ones.
      confidence: with which each position was decoded, NaN where no step did.
      stats: so far.
      steps: denoising steps so far, common to the batch.
      block: index of the block that these steps belong to.
      running: whether further steps follow.
    """

    tokens: Int[Array, "b l"]
    confidence: Float[Array, "b l"]
    stats: Stats
    steps: Int[Array, ""]
    block: Int[Array, ""]
    running: Bool[Array, ""]


@functools.partial(jax.jit, static_argnames="layout")
def begin(
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"],
    noise: Noise | None,
    embeds: Float[Array, "b p m"] | None = None,
    *,
    layout: Layout,
    plan: Plan,
) -> State:
    """The state before the first step; arguments as in `loop.denoise`, on a mesh with Auto axes."""

    def first(model: Model, tokens, valid, noise, embeds, plan: Plan) -> State:
        tokens, valid = (constrain(array, model.rules, "bl") for array in (tokens, valid))
        state = initial(model, tokens, valid, noise, embeds, layout, plan)
        # An argument that is returned as it is would be the caller's array, which the next piece overwrites.
        return state._replace(canvas=jax.tree.map(jnp.copy, state.canvas))

    return over_mesh(first, model, tokens, valid, noise, embeds, plan, out=None)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="state")
def resume(
    model: Model,
    state: State,
    noise: Noise | None,
    embeds: Float[Array, "b p m"] | None,
    steps: Int[Array, ""],
    layout: Layout,
    plan: Plan,
) -> tuple[State, Piece]:
    """Goes on to the end of the block, for at most `steps` denoising steps; a finished state stays as it is.

    Args:
      model: the model.
      state: of `begin` or of the last piece; it is donated.
      noise: as `begin` took it.
      embeds: likewise.
      steps: int32.
      layout: static geometry.
      plan: what the user decided; with `confidence`.
    """

    def piece(model: Model, state: State, noise, embeds, steps, plan: Plan) -> tuple[State, Piece]:
        start, before = state.canvas.block_start, state.record.steps
        same_block = lambda s: (s.canvas.block_start == start) & (s.record.steps - before < steps)
        after = run(model, noise, embeds, layout, plan, state, same_block)
        after = after._replace(cache=split_cache(after.cache, model, after.need.shape[0]))
        running = unfinished(layout, plan, after)
        tokens = jnp.where(running, after.canvas.tokens, finished(model, plan, after))
        block = (start - layout.prompt) // layout.block
        record = after.record
        confidence = record.confidence
        assert confidence is not None, "plan.confidence"
        if plan.stop:
            # What stands in the place of a stop and behind it was decoded by no step.
            confidence = jnp.where(tokens == after.canvas.tokens, confidence, jnp.nan)
        seen = Piece(tokens, confidence, record.stats(after.canvas), record.steps, block, running)

        # Arrays of their own: the next piece overwrites the state's while the host still reads these.
        return after, jax.tree.map(jnp.copy, seen)

    return over_mesh(piece, model, state, noise, embeds, steps, plan, out=None)
