"""The positions that a step computes: the policy's selection, and what drafts need beyond it."""

import dataclasses

from jaxtyping import Array, Bool

from dllm_jax.engine.drafting import further_positions
from dllm_jax.engine.generation import Generation
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.streams import one_stream, repeat


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
