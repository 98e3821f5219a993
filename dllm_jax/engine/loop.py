"""The jitted denoising loop: one program from the masked canvas to the finished one.

    while running:
        for each step variant (full canvas, then each static width and phase):
            while the coming step fits this variant: step

The policy's next selection is part of the loop state, so the next variant is known without leaving the
device. Consecutive steps of one variant run in an inner `while_loop`, not in a branch of a `switch`: XLA
copies a cache that is carried through several branches, but not one that is carried through nested loops.

A generation that is watched runs in pieces: one program begins it, and another is the same loop with one
more condition to stop on, the end of a block or a number of steps, which is an argument, so that one program
serves pieces of all lengths. What the loop carries stays on the devices and is donated from piece to piece.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.block_schedule import final, slowest
from dllm_jax.engine.generation import Generation, State
from dllm_jax.engine.group import next_variant
from dllm_jax.engine.logprobs import LogProbs
from dllm_jax.engine.plan import Inputs, Plan
from dllm_jax.engine.stats import Stats
from dllm_jax.engine.step import initial_state, split_cache, step
from dllm_jax.engine.trace import Trace
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.mesh import over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.state.canvas import Canvas, first_eos, first_of


@jax.jit
def denoise(
    model: Model, inputs: Inputs, plan: Plan
) -> tuple[Int[Array, "b l"], Stats, Trace | None, LogProbs | None]:
    """Runs steps until no sequence is active, each at most `Plan.step_limit`.

    Args:
      model: the model.
      inputs: prompt and masks, what of them is padding, where the sampler draws from.
      plan: policy, sampler and the like; programs are compiled once for all of their traced numbers.

    Returns:
      the tokens (with `stop_at_eos`, end-of-text in place of remaining masks of sequences whose logits were
      finite; with `stop`, in place of the stop and what follows; with `stop_texts`, of what follows the
      tokens that hold one), statistics per sequence, and the trace if
      the plan asks for it, and so the log-probabilities. Over a mesh, all are split by sequence.
    """
    lies = functools.partial(model.rules.of_results, (model, inputs.tokens), b=len(inputs.tokens))
    by_sequence, by_step = lies("b"), lies("tb")
    specs: dict[str, Any] = dict.fromkeys(Trace._fields, by_step) | {"steps": PartitionSpec()}
    specs |= {} if model.spec.causal_context else {"causal": None}
    trace = Trace(**specs) if plan.trace else None
    return over_mesh(_denoise, model, inputs, plan, out=(by_sequence, by_sequence, trace, by_sequence))


def _denoise(
    model: Model, inputs: Inputs, plan: Plan
) -> tuple[Int[Array, "b l"], Stats, Trace | None, LogProbs | None]:
    generation = Generation.of(model, inputs, plan)
    state = run(generation, initial_state(generation, inputs))
    tokens = final_tokens(plan, state)
    logprobs = final_logprobs(state, tokens)
    stats, trace = final_stats(plan, state, tokens), state.record.completed(state.canvas)
    return tokens[:, : plan.layout.shown], stats, trace, logprobs


def run(
    generation: Generation, state: State, wanted: Callable[[State], Bool[Array, ""]] | None = None
) -> State:
    """The state after as many steps as are wanted, at most until the generation is finished.

    Args:
      generation: the constants.
      state: before the first of these steps.
      wanted: whether another step is wanted; None wants all of them.
    """
    plan = generation.plan

    def running(state: State) -> Bool[Array, ""]:
        goes_on = jnp.any(state.canvas.active)
        return goes_on if wanted is None else goes_on & wanted(state)

    def comes_next(variant: Variant, state: State) -> Bool[Array, ""]:
        return next_variant(plan, state) == plan.variants.index(variant)

    # Profiles and compiled programs show which step an operation belongs to.
    def one(variant: Variant, state: State) -> State:
        with jax.named_scope(scope(variant)):
            return step(generation, variant, state)

    # Widest first: a block begins with a full step, and later steps need less.
    def runs_of_each(state: State) -> State:
        for variant in reversed(plan.variants):
            state = jax.lax.while_loop(
                lambda s, v=variant: running(s) & comes_next(v, s),
                lambda s, v=variant: one(v, s),
                state,
            )
        return state

    return jax.lax.while_loop(running, runs_of_each, state)


def final_tokens(plan: Plan, state: State) -> Int[Array, "b l"]:
    """The tokens of a generation that is finished."""
    # A sequence that was stopped early has masks after its end-of-text. Masks that remain for want of finite
    # logits, or of an allowed token, are no answer that has ended.
    tokens, eos_id = state.canvas.tokens, state.canvas.spec.eos_id
    if plan.stop_at_eos:
        remaining = state.canvas.masked & state.record.finite[:, None]
        if plan.constraints:
            remaining &= state.canvas.position > first_eos(state.canvas)[:, None]
        tokens = jnp.where(remaining, eos_id, tokens)
    if (stop := state.canvas.stop) is not None:
        behind = (state.canvas.position >= stop[:, None]) & (state.canvas.position < state.canvas.layout.end)
        tokens = jnp.where(behind, eos_id, tokens)
    return tokens


def final_stats(plan: Plan, state: State, tokens: Int[Array, "b l"]) -> Stats:
    """The statistics of a generation that is finished, given its tokens."""
    stats, canvas = state.record.stats(state.canvas), state.canvas
    if not plan.constraints:
        return stats
    left = (tokens == canvas.spec.mask_id) & canvas.valid & canvas.response
    left &= (canvas.position < canvas.layout.end) & stats.finite[:, None]
    return stats._replace(unfilled_tokens=jnp.sum(left, axis=1, dtype=jnp.int32))


def final_logprobs(state: State, tokens: Int[Array, "b l"]) -> LogProbs | None:
    """The log-probabilities of a generation that is finished, given its tokens; None if none are recorded."""
    if (found := state.record.logprobs) is None:
        return None
    filled_in = tokens != state.canvas.tokens
    return found.where(filled_in, LogProbs.begin(state.canvas, found.top_tokens.shape[2]))


def scope(variant: Variant) -> str:
    """The name scope of a step's operations: its width, and its phase if the policy has several."""
    if variant.width is None:
        return "full_step"
    return f"partial_step_{variant.width}" + (f"_{variant.phase}" if variant.phase else "")


# -- the loop in pieces, for those who watch it -----------------------------------------------------


class Piece(NamedTuple):
    """State of a generation for the host, after some steps.

    Attributes:
      tokens: after them; those of the finished generation after the last ones.
      confidence: Confidence at which each position was unmasked, infinity elsewhere (NaN would end a
        program under `jax_debug_nans`).
      stats: so far.
      steps: Number of steps of each sequence.
      block: index of the block that the slowest sequence was in.
      running: whether further steps follow.
      logprobs: Log-probabilities so far; None if none are recorded.
      settled: Position up to which the tokens of each sequence stay as they are.
    """

    tokens: Int[Array, "b l"]
    confidence: Float[Array, "b l"]
    stats: Stats
    steps: Int[Array, "b"]
    block: Int[Array, ""]
    running: Bool[Array, ""]
    logprobs: LogProbs | None
    settled: Int[Array, "b"]


@jax.jit
def begin(model: Model, inputs: Inputs, plan: Plan) -> State:
    """The state before the first step; arguments as in `loop.denoise`, on a mesh with Auto axes."""

    def start(model: Model, inputs: Inputs, plan: Plan) -> State:
        state = initial_state(Generation.of(model, inputs, plan), inputs)
        # An argument that is returned as it is would be the caller's array, which the next piece overwrites.
        return state._replace(canvas=jax.tree.map(jnp.copy, state.canvas))

    return over_mesh(start, model, inputs, plan, out=None)


def settled_positions(plan: Plan, canvas: Canvas) -> Int[Array, "b"]:
    """The position of each sequence's first mask, or of its block while tokens of that may be revised."""
    first = first_of(canvas.masked & canvas.response, canvas.layout.length)
    stays = canvas.done | final(canvas, plan.sampler)
    return jnp.where(stays, first, jnp.minimum(first, canvas.block_start))


@functools.partial(jax.jit, donate_argnames="state")
def resume(
    model: Model, inputs: Inputs, plan: Plan, state: State, steps: Int[Array, ""]
) -> tuple[State, Piece]:
    """Goes on until no sequence is in the block of the slowest, or one has taken `steps` denoising steps.

    A finished state stays as it is.

    Args:
      model: the model.
      inputs: Inputs given to `begin`.
      plan: Options of the run, with `confidence`.
      state: State returned by `begin` or by the last piece; it is donated.
      steps: int32.
    """

    def piece(model: Model, inputs: Inputs, plan: Plan, state: State, steps) -> tuple[State, Piece]:
        start, before = slowest(state.canvas), state.canvas.passes
        made = lambda s: jnp.max(s.canvas.passes - before)
        wanted = lambda s: (slowest(s.canvas) == start) & (made(s) < steps)
        after = run(Generation.of(model, inputs, plan), state, wanted)
        after = after._replace(cache=split_cache(after.cache, model, after.need.shape[0]))
        running = jnp.any(after.canvas.active)
        tokens = jnp.where(running, after.canvas.tokens, final_tokens(plan, after))
        # A block that a prompt's end shares is the first one too.
        block = jnp.maximum(-((plan.layout.prompt - start) // plan.layout.block), 0)
        confidence = after.record.confidence
        assert confidence is not None, "plan.confidence"
        if after.canvas.stop is not None:
            # No step decoded the tokens at a stop and after it.
            confidence = jnp.where(tokens == after.canvas.tokens, confidence, jnp.inf)
        stats = final_stats(plan, after, tokens)
        logprobs = final_logprobs(after, tokens)
        settled = jnp.where(running, settled_positions(plan, after.canvas), plan.layout.length)
        seen = Piece(tokens, confidence, stats, after.canvas.passes, block, running, logprobs, settled)

        # Arrays of their own: the next piece overwrites the state's while the host still reads these.
        return after, jax.tree.map(jnp.copy, seen)

    return over_mesh(piece, model, inputs, plan, state, steps, out=None)


@jax.jit
def recorded_steps(state: State) -> Trace | None:
    """The trace of a state's steps so far; None if none is recorded."""
    return state.record.completed(state.canvas)
