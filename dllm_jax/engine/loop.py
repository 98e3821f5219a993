"""The jitted denoising loop: one program from the masked canvas to the finished one.

    while running:
        for each step variant (full canvas, then each static width and phase):
            while the coming step fits this variant: step

The policy's next selection is part of the loop state, so the next variant is known without leaving the
device. Consecutive steps of one variant run in an inner `while_loop`, not in a branch of a `switch`: XLA
copies a cache that is carried through several branches, but not one that is carried through nested loops.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from dllm_jax.engine.beginning import initial_state
from dllm_jax.engine.drafts import take_drafted_step
from dllm_jax.engine.features.logprobs import LogProbs
from dllm_jax.engine.features.trace import OF_GROWTH, RecordedSteps, Trace
from dllm_jax.engine.generation import Generation, Inputs, Plan, State
from dllm_jax.engine.group import (
    axes_of_sequences,
    choose_group,
    full_step_batch,
    gather_constants,
    gather_state,
    next_variant,
    takes_part,
    write_back,
)
from dllm_jax.engine.stats import Stats
from dllm_jax.engine.step import denoise_once, select_positions
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.mesh import over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.state.rows import repeat


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
      finite; with `stop`, in place of the stop and what follows; with stop texts, of what follows the
      tokens that hold one), statistics per sequence, and the trace if
      the plan asks for it, and so the log-probabilities. Over a mesh, all are split by sequence.
    """
    lies = functools.partial(model.rules.of_results, (model, inputs.tokens), b=len(inputs.tokens))
    by_sequence, by_step = lies("b"), lies("tb")
    trace = None
    if isinstance(recorded := plan.by_name.get("trace"), RecordedSteps):
        specs: dict[str, Any] = dict.fromkeys(Trace._fields, by_step)
        specs |= {"steps": PartitionSpec(), "start": by_sequence}
        specs |= {} if recorded.causal else {"causal": None}
        specs |= {"sampler_steps": by_sequence if "drafted" in plan.by_name else None}
        specs |= {} if plan.sampler.procedure.grows else dict.fromkeys(OF_GROWTH)
        trace = Trace(**specs)
    return over_mesh(_denoise, model, inputs, plan, out=(by_sequence, by_sequence, trace, by_sequence))


def _denoise(
    model: Model, inputs: Inputs, plan: Plan
) -> tuple[Int[Array, "b l"], Stats, Trace | None, LogProbs | None]:
    generation = Generation.of(model, inputs, plan)
    state = run(generation, initial_state(generation, inputs))
    tokens = final_tokens(plan, state)
    stats, outputs = final_stats(plan, state, tokens), final_outputs(plan, state, tokens)
    return tokens[:, : plan.layout.shown], stats, outputs.get("trace"), outputs.get("logprobs")


def run(
    generation: Generation,
    state: State,
    wanted: Callable[[State], Bool[Array, ""]] = lambda state: jnp.bool_(True),
) -> State:
    """The state after as many steps as are wanted, at most until the generation is finished.

    Args:
      generation: the constants.
      state: before the first of these steps.
      wanted: whether another step is wanted; by default, all of them.
    """
    plan = generation.plan

    def running(state: State) -> Bool[Array, ""]:
        return jnp.any(state.canvas.active) & wanted(state)

    def comes_next(variant: Variant, state: State) -> Bool[Array, ""]:
        return next_variant(plan, state) == plan.variants.index(variant)

    # Profiles and compiled programs show which step an operation belongs to.
    def named_step(variant: Variant, state: State) -> State:
        with jax.named_scope(scope(variant)):
            return step(generation, variant, state)

    # Widest first: a block begins with a full step, and later steps need less.
    def runs_of_each(state: State) -> State:
        for variant in reversed(plan.variants):
            state = jax.lax.while_loop(
                lambda s, v=variant: running(s) & comes_next(v, s),
                lambda s, v=variant: named_step(v, s),
                state,
            )
        return state

    return jax.lax.while_loop(running, runs_of_each, state)


def final_tokens(plan: Plan, state: State) -> Int[Array, "b l"]:
    """The tokens of a generation that is finished."""
    canvas, finite = state.canvas, state.record["counts"].finite
    tokens = canvas.tokens
    for feature in plan.acting:
        tokens = feature.final_tokens(canvas, finite, tokens)
    return tokens


def final_stats(plan: Plan, state: State, tokens: Int[Array, "b l"]) -> Stats:
    """The statistics of a generation that is finished, given its tokens."""
    fields = (feature.finish(state.record, state.canvas, tokens) for feature in plan.features)
    return Stats(**{name: value for several in fields for name, value in several.items()})


def final_outputs(plan: Plan, state: State, tokens: Int[Array, "b l"]) -> dict[str, Any]:
    """The additions of features to the output of a generation that is finished, by their names."""
    return {feature.name: feature.output(state.record, state.canvas, tokens) for feature in plan.features}


def scope(variant: Variant) -> str:
    """The name scope of a step's operations: its width, and its phase if the policy has several."""
    if variant.is_full:
        return "full_step"
    return f"partial_step_{variant.width}" + (f"_{variant.phase}" if variant.phase else "")


# -- a step ---------------------------------------------------------------------------------------------


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
    step_record, cache, entries = stages(generation, variant, state, sequences)
    record = {feature.name: feature.add(state.record | entries, step_record) for feature in plan.features}
    need = select_positions(generation, cache, step_record.left)
    return State(step_record.left, cache, need, record, step_record.decided.memory)
