"""The jitted denoising loop: one program from the masked canvas to the finished one.

    while running:
        for each step variant (full canvas, then each static width):
            while the coming step fits this variant: step

The policy's next selection is part of the loop state, so the next variant is known without leaving the
device. Consecutive steps of one variant run in an inner `while_loop`, not in a branch of a `switch`: XLA
copies a cache that is carried through several branches, but not one that is carried through nested loops.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.decoding.plan import Plan
from dllm_jax.decoding.stats import Stats, Trace
from dllm_jax.decoding.step import State, canvas_embeds, initial, step
from dllm_jax.decoding.widths import narrowest_variant
from dllm_jax.nn.intervention import for_sequences
from dllm_jax.nn.mesh import constrain, current_mesh, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import rope_table
from dllm_jax.samplers.noise import Noise
from dllm_jax.state.canvas import repeat
from dllm_jax.state.layout import Layout


@functools.partial(jax.jit, static_argnames="layout")
def denoise(
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"],
    noise: Noise | None,
    embeds: Float[Array, "b p m"] | None = None,
    *,
    layout: Layout,
    plan: Plan,
) -> tuple[Int[Array, "b l"], Stats, Trace | None]:
    """Runs steps until no sequence is active, at most `Plan.step_limit`.

    Args:
      model: the model.
      tokens: prompt and masks.
      valid: False at padding.
      noise: source of random numbers; None if the sampler draws none.
      embeds: inputs of the prompt where its tokens are negative; None if there are none.
      layout: static geometry.
      plan: policy, sampler and the like; programs are compiled once for all of their traced numbers.

    Returns:
      the tokens (with `stop_at_eos`, end-of-text in place of remaining masks of sequences whose logits were
      finite; with `stop`, in place of the stop and what follows), statistics per sequence, and the trace if
      the plan asks for it. Over a mesh, all are split by sequence.
    """
    mesh = current_mesh((model, tokens))
    split = () if mesh is None else model.rules.axes(mesh, "b", tokens.shape[0])
    by_sequence, by_step = PartitionSpec(split or None), PartitionSpec(None, split or None)
    specs: list[Any] = [by_step] * (len(Trace._fields) - 1)
    trace = Trace(*specs, steps=cast(Any, PartitionSpec())) if plan.trace else None
    whole = functools.partial(_denoise, layout=layout)
    return over_mesh(whole, model, tokens, valid, noise, embeds, plan, out=(by_sequence, by_sequence, trace))


def _denoise(
    model: Model,
    tokens: Int[Array, "b l"],
    valid: Bool[Array, "b l"],
    noise: Noise | None,
    embeds: Float[Array, "b p m"] | None,
    plan: Plan,
    layout: Layout,
) -> tuple[Int[Array, "b l"], Stats, Trace | None]:
    tokens, valid = (constrain(array, model.rules, "bl") for array in (tokens, valid))
    state = initial(model, tokens, valid, noise, embeds, layout, plan)
    state = run(model, noise, embeds, layout, plan, state)
    return finished(model, plan, state), state.record.stats(state.canvas), state.record.trace


def run(
    model: Model,
    noise: Noise | None,
    embeds: Float[Array, "b p m"] | None,
    layout: Layout,
    plan: Plan,
    state: State,
    wanted: Callable[[State], Bool[Array, ""]] | None = None,
) -> State:
    """The state after as many steps as are wanted, at most until the generation is finished.

    Args:
      model: the model.
      noise: source of random numbers; None if the sampler draws none.
      embeds: inputs of the prompt where its tokens are negative; None if there are none.
      layout: static geometry.
      plan: what the user decided.
      state: before the first of these steps.
      wanted: whether another step is wanted; None wants all of them.
    """
    interventions = for_sequences(plan.interventions, len(state.canvas.tokens), plan.streams)
    plan = dataclasses.replace(plan, interventions=interventions)
    embeds = canvas_embeds(model, embeds, layout, plan)
    # Without the barrier XLA moves the table's parts into the nested loops, and its TPU compiler then fails
    # an internal check of theirs (jaxlib 0.10 and 0.12, `Policy()` on one chip).
    rope = jax.lax.optimization_barrier(rope_table(layout.length, model.spec.head, model.spec.rope_base))

    def running(state: State) -> Bool[Array, ""]:
        goes_on = unfinished(layout, plan, state)
        return goes_on if wanted is None else goes_on & wanted(state)

    def comes_next(variant: int | None, state: State) -> Bool[Array, ""]:
        return coming(plan, state) == (len(plan.widths) if variant is None else plan.widths.index(variant))

    # Profiles and compiled programs show which step an operation belongs to.
    def one(variant: int | None, state: State) -> State:
        with jax.named_scope(scope(variant)):
            return step(model, rope, noise, plan, variant, state, embeds)

    # Widest first: a block begins with a full step, and later steps need less.
    def runs_of_each(state: State) -> State:
        for variant in (None, *reversed(plan.widths)):
            state = jax.lax.while_loop(
                lambda s, v=variant: running(s) & comes_next(v, s),
                lambda s, v=variant: one(v, s),
                state,
            )
        return state

    return jax.lax.while_loop(running, runs_of_each, state)


def unfinished(layout: Layout, plan: Plan, state: State) -> Bool[Array, ""]:
    """Whether another step follows: some sequence is active, and the limit of steps is not reached."""
    return jnp.any(state.canvas.active) & (state.record.steps < plan.step_limit(layout))


def finished(model: Model, plan: Plan, state: State) -> Int[Array, "b l"]:
    """The tokens of a generation that is finished."""
    # A sequence that was stopped early has masks behind its end-of-text. Masks that remain for want of finite
    # logits are no answer that has ended.
    tokens = state.canvas.tokens
    if plan.stop_at_eos:
        remaining = state.canvas.masked & state.record.finite[:, None]
        tokens = jnp.where(remaining, model.spec.eos_id, tokens)
    if (stop := state.canvas.stop) is not None:
        behind = (state.canvas.position >= stop[:, None]) & (state.canvas.position < state.canvas.layout.end)
        tokens = jnp.where(behind, model.spec.eos_id, tokens)
    return tokens


def scope(variant: int | None) -> str:
    """The name scope of a step's operations: over the canvas in place (None), or of a static width."""
    return "full_step" if variant is None else f"partial_step_{variant}"


def coming(plan: Plan, state: State) -> Int[Array, ""]:
    """The variant of the coming step: an index into `plan.widths`, or their number for the full canvas."""
    return narrowest_variant(plan.widths, state.need, repeat(state.canvas, plan.streams).active)
