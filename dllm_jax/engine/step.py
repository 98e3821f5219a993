"""One step of the loop: of the sequences that it is for, recorded, and with the next selection."""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.engine import recorders
from dllm_jax.engine.denoising import denoise_once, select_positions
from dllm_jax.engine.generation import Generation, Plan, State
from dllm_jax.engine.group import (
    axes_of_sequences,
    choose_group,
    full_step_batch,
    gather_constants,
    gather_state,
    takes_part,
    write_back,
)
from dllm_jax.engine.verifying import take_drafted_step
from dllm_jax.engine.widths import Variant
from dllm_jax.state.changes import count_forward
from dllm_jax.state.rows import repeat


def step(generation: Generation, variant: Variant, state: State) -> State:
    """One denoising step of the sequences that it is for; the others stay as they are, and count none.

    Args:
      generation: the constants.
      variant: Kind of step, static.
      state: before the step.
    """
    plan = generation.plan
    part = takes_part(plan, variant, state)
    if not variant.is_full or full_step_batch(plan, len(part)) == len(part):
        return take_step(generation, variant, _only(state, part, plan), jnp.arange(len(part)))
    group = choose_group(part, state.canvas, plan)
    axes = axes_of_sequences(generation.model, plan, len(state.need))
    group_state = _only(gather_state(generation, state, group, axes), part[group], plan)
    after = take_step(gather_constants(generation, group), variant, group_state, group)

    # What only fills the group is not written back, even if a policy's layer changes it.
    return write_back(generation, state, after, jnp.where(part[group], group, len(part)), axes)


def _only(state: State, part: Bool[Array, "b"], plan: Plan) -> State:
    """The state in which only these sequences are active, and need anything."""
    canvas = dataclasses.replace(state.canvas, active=part)
    return state._replace(canvas=canvas, need=state.need & repeat(part, plan.streams)[:, None])


def take_step(generation: Generation, variant: Variant, state: State, sequences: Int[Array, "b"]) -> State:
    """Takes a step of the active sequences of a state, whose places in the trace are `sequences`."""
    plan = generation.plan
    stages = functools.partial(take_drafted_step, plan.drafting) if plan.drafting else denoise_once
    taken, cache, memory = stages(generation, variant, state, sequences)
    left = count_forward(taken.left, state.canvas)
    taken = taken._replace(after=count_forward(taken.after, state.canvas), left=left)
    record = recorders.add(plan, state.record, taken)
    return State(left, cache, select_positions(generation, cache, left), record, memory)
