"""One denoising step of the sampler in stages: rows, forward, propose and decide, observe, apply, count.

Then positions are selected for the coming step. Each stage is a function, here or in the file of its name.
`FreeDave` brings a step of its own over the same stages (`engine.verifying`).
"""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.branches import shadow_of
from dllm_jax.engine.decide import apply, decide
from dllm_jax.engine.drafting import further_positions
from dllm_jax.engine.generation import Generation, Plan, State
from dllm_jax.engine.growth import grow
from dllm_jax.engine.network import computed_rows, network, network_inputs
from dllm_jax.engine.recorders import Taken
from dllm_jax.engine.trace import attended
from dllm_jax.engine.widths import Variant
from dllm_jax.options.returned import like
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, one_stream, repeat


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


def denoise_once(
    generation: Generation, variant: Variant, state: State, sequences: Int[Array, "b"]
) -> tuple[Taken, Cache, PyTree]:
    """One step of the sampler by one forward pass over the canvas: what it did, the cache, and the memory."""
    plan, canvas = generation.plan, state.canvas
    read = plan.sampler.read_as(canvas, state.memory)
    forward = run_forward(generation, variant, state, read)
    own = own_rows(plan, forward.rows)
    rows = forward.cache.with_output(own, plan.streams)
    decided = decide(generation, canvas, rows, forward.hidden, state.memory, read.verifies)

    # The policy sees what was proposed before the canvas moves on.
    proposal = repeat(decided.proposal, plan.streams)
    cache = plan.policy.observe(forward.cache, forward.canvas, forward.rows, proposal)
    cache = like(plan.policy, "observe", cache, state.cache, "as before the step")
    after = apply(plan, canvas, decided)
    extra, cache = cache.take_extra_positions(canvas, plan.streams)
    left = after
    if plan.sampler.grows:
        left = grow(plan, canvas, after, decided.end_confidence, decided.proposal)

    # Recorders see the conditional stream alone.
    read = attended(plan.policy, state.cache, forward.canvas, forward.rows)
    taken = Taken(
        sequences=sequences,
        before=canvas,
        after=after,
        left=left,
        computed=own.mask(),
        executed=executed_positions(variant, canvas),
        read=one_stream(read, 0, plan.streams),
        extra=extra,
        finite=decided.finite,
        proposal=decided.proposal,
        branches=canvas.active,
        kept=decided.added_to(state.record, canvas, after),
    )
    return taken, cache, decided.memory


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
    rows = computed_rows(state.need, variant, streams, plan.policy)
    shadow = shadow_of(plan.sampler, streams)
    hidden, cache = network(generation, network_inputs(plan, streams), streams, rows, state.cache, shadow)
    return Forward(streams, rows, hidden, cache)


def own_rows(plan: Plan, rows: Rows) -> Rows:
    """The rows of the conditional stream, which alone is sampled and counted."""
    return dataclasses.replace(rows, index=one_stream(rows.index, 0, plan.streams))


def executed_positions(variant: Variant, canvas: Canvas) -> int:
    """Positions that the program runs, of all sequences: a full step runs the whole canvas, padding too."""
    batch, length = canvas.tokens.shape
    return batch * (length if variant.width is None else variant.width)


# -- the coming step ------------------------------------------------------------------------------------


def select_positions(generation: Generation, cache: Cache, canvas: Canvas) -> Bool[Array, "streams_b l"]:
    """The policy's selection for the coming step, empty in inactive sequences.

    With guidance both streams compute what the conditional one selects: they predict the same positions.
    """
    plan = generation.plan
    canvas = dataclasses.replace(canvas, planned_order=plan.sampler.planned(canvas, generation.noise))
    selected = one_stream(plan.policy.select(cache, repeat(canvas, plan.streams)), 0, plan.streams)
    selected = canvas.without_final(selected)
    if (drafting := plan.drafting) and drafting.eager:
        selected |= further_positions(drafting, canvas)
    return repeat(selected & canvas.active[:, None], plan.streams)
