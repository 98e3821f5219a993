"""One denoising step of the sampler in stages: rows, forward, propose and decide, observe, apply, count.

Each stage is a function, here or in the file of its name. `FreeDave` brings a step of its own over the same
stages (`engine.verifying`).
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from dllm_jax.engine.branches import shadow_of
from dllm_jax.engine.decide import Decided, apply, decide
from dllm_jax.engine.generation import Generation, State
from dllm_jax.engine.growth import grow
from dllm_jax.engine.network import computed_rows, network, network_inputs
from dllm_jax.engine.plan import Plan
from dllm_jax.engine.recorders import Taken
from dllm_jax.engine.trace import attended
from dllm_jax.engine.widths import Variant
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas, repeat, stream
from dllm_jax.state.rows import Rows


class Forward(NamedTuple):
    """A forward pass over the rows of a step.

    Attributes:
      canvas: Canvas as the network read it, of all streams.
      rows: Computed positions, of all streams.
      hidden: Residual stream after the last layer.
      cache: Cache as the layers left it.
    """

    canvas: Canvas
    rows: Rows
    hidden: Float[Array, "streams_b q m"]
    cache: Cache


def denoise_once(generation: Generation, variant: Variant, state: State) -> tuple[Taken, Cache, PyTree]:
    """One step of the sampler by one forward pass over the canvas: what it did, the cache, and the memory."""
    plan, canvas = generation.plan, state.canvas
    read = plan.sampler.read_as(canvas, state.memory)
    forward = run_forward(generation, variant, state, read)
    rows = forward.cache.with_output(own_rows(plan, forward.rows), plan.streams)
    decided = decide(generation, canvas, rows, forward.hidden, state.memory, read.verifying)

    # The policy sees what was proposed before the canvas moves on.
    proposal = repeat(decided.proposal, plan.streams)
    cache = plan.policy.observe(forward.cache, forward.canvas, forward.rows, proposal)
    after = apply(plan, canvas, decided)
    extra, cache = cache.take_extra_positions(plan.streams)
    taken = counted(generation, variant, state, forward, decided, after)
    sure = decided.end_confidence
    grown = None if sure is None else grow(plan, canvas, after, sure, decided.proposal)
    return taken._replace(extra=extra, grown=grown), cache, decided.memory


def run_forward(generation: Generation, variant: Variant, state: State, read: Canvas) -> Forward:
    """Runs the network over the selected positions; K/V of the others come from the policy's cache.

    Args:
      generation: Constants of the loop.
      variant: Kind of step.
      state: State before the step.
      read: Canvas as the network reads it.
    """
    plan = generation.plan
    streams = repeat(read, plan.streams)
    rows = computed_rows(state.need, variant, streams.spec, plan.policy)
    shadow = shadow_of(plan.sampler, streams)
    hidden, cache = network(generation, network_inputs(plan, streams), streams, rows, state.cache, shadow)
    return Forward(streams, rows, hidden, cache)


def own_rows(plan: Plan, rows: Rows) -> Rows:
    """The rows of the conditional stream, which alone is sampled and counted."""
    return dataclasses.replace(rows, index=stream(rows.index, 0, plan.streams))


def counted(
    generation: Generation, variant: Variant, state: State, forward: Forward, decided: Decided, after: Canvas
) -> Taken:
    """Accounts for a step to the recorders, which see the conditional stream alone."""
    plan, before = generation.plan, state.canvas
    read = attended(plan.policy, state.cache, forward.canvas, forward.rows)
    recorded = state.record.get("logprobs")
    return Taken(
        before=before,
        after=after,
        computed=own_rows(plan, forward.rows).mask(),
        executed=executed_positions(variant, before),
        read=stream(read, 0, plan.streams),
        extra=None,
        finite=decided.finite,
        proposal=decided.proposal,
        branches=before.active,
        logprobs=decided.added_to(recorded, before, after),
    )


def executed_positions(variant: Variant, canvas: Canvas) -> Int[Array, ""] | int:
    """Positions that the program runs, of all sequences."""
    return jnp.sum(canvas.valid) if variant.width is None else variant.width * len(canvas.tokens)
