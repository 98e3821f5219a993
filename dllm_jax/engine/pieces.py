"""The loop in pieces, for a generation that is watched or whose slots are filled while it runs.

One program begins it, and another is the same loop with one more condition to stop on. Numbers in that
condition are arguments, so that one program serves pieces of all lengths. What the loop carries stays on the
devices and is donated from piece to piece.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.beginning import initial_state, split_cache
from dllm_jax.engine.block_schedule import final, slowest
from dllm_jax.engine.features.counts import passes_of
from dllm_jax.engine.features.logprobs import LogProbs
from dllm_jax.engine.features.trace import Trace
from dllm_jax.engine.generation import Generation, Inputs, Plan, State
from dllm_jax.engine.loop import final_outputs, final_stats, final_tokens, run
from dllm_jax.engine.stats import Stats
from dllm_jax.nn.mesh import over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.growing import with_ends
from dllm_jax.state.rows import first_of


class Piece(NamedTuple):
    """State of a generation for the host, after some steps.

    Attributes:
      tokens: after them; those of the finished generation where sequences have ended (`run_piece`).
      goes_on: Sequences for which further steps follow.
      stats: so far.
      steps: Number of steps of each sequence.
      block: index of the block that the slowest sequence was in.
      settled: Position up to which the tokens of each sequence stay as they are.
      logprobs: Log-probabilities so far; None if none are recorded.
      confidence: Confidence at which each position was unmasked, infinity elsewhere (NaN would end a
        program under `jax_debug_nans`); None if none is recorded.
      unmasked: Positions whose token the piece unmasked, of answers that grow, whose tokens move.
    """

    tokens: Int[Array, "b l"]
    goes_on: Bool[Array, "b"]
    stats: Stats
    steps: Int[Array, "b"]
    block: Int[Array, ""]
    settled: Int[Array, "b"]
    logprobs: LogProbs | None = None
    confidence: Float[Array, "b l"] | None = None
    unmasked: Bool[Array, "b l"] | None = None


def run_piece(
    generation: Generation, state: State, wanted: Callable[[State], Bool[Array, ""]], together: bool
) -> tuple[State, Piece]:
    """Runs steps while they are wanted; a finished state stays as it is.

    Args:
      generation: Constants of the run.
      state: State before the piece.
      wanted: Whether another step is wanted.
      together: Whether ended sequences are shown as they were decoded until all have ended.
    """
    plan, start = generation.plan, slowest(state.canvas)
    after = run(generation, state, wanted)
    after = after._replace(cache=split_cache(after.cache, generation.model, after.need.shape[0]))
    canvas, record = after.canvas, after.record
    tokens, running = final_tokens(plan, after), jnp.any(canvas.active)
    tokens = jnp.where(running, with_ends(canvas, canvas.tokens), tokens) if together else tokens
    # No step decoded masks, nor the end-of-text at a stop and after it.
    decoded = (tokens == canvas.tokens) & ~canvas.masked
    confidence = jax.tree.map(lambda scores: jnp.where(decoded, scores, jnp.inf), record.get("confidence"))
    piece = Piece(
        tokens=tokens,
        goes_on=canvas.active,
        stats=final_stats(plan, after, tokens),
        steps=passes_of(record, canvas),
        # A block that a prompt's end shares is the first one too.
        block=jnp.maximum(-(-start // plan.layout.block), 0),
        settled=jnp.where(running, settled_positions(plan, canvas), plan.layout.length),
        logprobs=final_outputs(plan, after, tokens).get("logprobs"),
        confidence=confidence,
    )
    return after, piece


def settled_positions(plan: Plan, canvas: Canvas) -> Int[Array, "b"]:
    """The position of each sequence's first mask or stop, or of its block while it may be revised.

    The first token of a draft is the last that is known, which no verification takes back.
    """
    first = jnp.minimum(first_of(canvas.masked & canvas.response, canvas.layout.length), canvas.stops_at)
    stays = canvas.done | final(canvas, plan.sampler)
    return jnp.where(stays, first, jnp.minimum(first, canvas.block_start + canvas.layout.drafts))


@jax.jit
def begin_pieces(model: Model, inputs: Inputs, plan: Plan) -> State:
    """The state before the first step; arguments as in `loop.denoise`, on a mesh with Auto axes."""

    def start(model: Model, inputs: Inputs, plan: Plan) -> State:
        state = initial_state(Generation.of(model, inputs, plan), inputs)
        # An argument that is returned as it is would be the caller's array, which the next piece overwrites.
        return state._replace(canvas=jax.tree.map(jnp.copy, state.canvas))

    return over_mesh(start, model, inputs, plan, out=None)


@functools.partial(jax.jit, donate_argnames="state")
def resume(
    model: Model, inputs: Inputs, plan: Plan, state: State, steps: Int[Array, ""]
) -> tuple[State, Piece]:
    """Goes on until no sequence is in the block of the slowest, or one has taken `steps` denoising steps.

    A finished state stays as it is.

    Args:
      model: the model.
      inputs: Inputs given to `begin_pieces`.
      plan: Options of the run, with `confidence`.
      state: State returned by `begin_pieces` or by the last piece; it is donated.
      steps: int32.
    """

    def piece(model: Model, inputs: Inputs, plan: Plan, state: State, steps) -> tuple[State, Piece]:
        start, before = slowest(state.canvas), passes_of(state.record, state.canvas)
        made = lambda s: jnp.max(passes_of(s.record, s.canvas) - before)
        wanted = lambda s: (slowest(s.canvas) == start) & (made(s) < steps)
        after, seen = run_piece(Generation.of(model, inputs, plan), state, wanted, together=True)
        if plan.sampler.procedure.grows:
            seen = seen._replace(unmasked=after.canvas.decoded_at >= state.canvas.step[:, None])

        # Arrays of their own: the next piece overwrites the state's while the host still reads these.
        return after, jax.tree.map(jnp.copy, seen)

    return over_mesh(piece, model, inputs, plan, state, steps, out=None)


@jax.jit
def recorded_steps(plan: Plan, state: State) -> Trace | None:
    """The trace of a state's steps so far; None if none is recorded."""
    return final_outputs(plan, state, state.canvas.tokens).get("trace")
