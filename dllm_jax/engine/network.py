"""The network of one step: computed positions, and further canvases with them, through all layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.branches import Branches, over_branches
from dllm_jax.engine.generation import Generation
from dllm_jax.engine.plan import Plan
from dllm_jax.engine.widths import Variant, at_end
from dllm_jax.nn.intervened import IntervenedLayer, embedded, intervened
from dllm_jax.nn.layer import Layer, embed, layer_at, walk
from dllm_jax.nn.low_rank import acting_in
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, compact_rows, full_rows, last_rows, scatter
from dllm_jax.xla.loops import REFRESH, when
from dllm_jax.xla.stacks import traced_once

Carry = tuple[Any, Cache]  # residual stream, with branches a pair of them, and the cache


def computed_rows(need: Bool[Array, "b l"], variant: Variant, spec: ModelSpec, policy: Policy) -> Rows:
    """The rows of one step: in place on the canvas, or of the variant's width, which holds them all.

    These are gathered, unless the policy's selections lie at the end of the canvas (`Policy._at_end`).
    """
    width, phase = variant
    if width is None:
        return full_rows(need)
    if at_end(policy, spec):
        return dataclasses.replace(last_rows(need, width), phase=phase)

    # A step that computes a finished block computes all of it, and more than that (`Canvas.without_final`).
    one = width <= spec.block_size and not spec.causal_context
    return dataclasses.replace(compact_rows(need, width), in_one_block=one, phase=phase)


def network(
    generation: Generation,
    tokens: Int[Array, "b l"],
    canvas: Canvas,
    rows: Rows,
    cache: Cache,
    branches: Branches | None = None,
) -> tuple[Float[Array, "b q_plus_s m"], Cache]:
    """Runs the rows through all layers; the stacked cache is part of the carry and is written in place.

    Args:
      generation: the constants.
      tokens: input ids, of all streams' sequences, as are the others.
      canvas: state before the step.
      rows: Positions to compute.
      cache: the policy's.
      branches: Further canvases of each sequence; None if there are none.

    Returns:
      the residual stream at the rows after the last layer, after it that of the branches, and the changed
      cache.

    Raises:
      ValueError: the policy's layer never passes a place that an intervention changes.
    """
    model, plan, _, embeds, rope, _ = generation
    params = model.params
    policy, interventions = plan.policy, plan.interventions

    # What layers may attend to is settled before the first of them, like the rows.
    readable = policy.readable(cache, canvas)
    cache = policy.before_layers(cache, canvas, rows)
    layer = policy.layer if branches is None else over_branches(policy.layer, branches)

    def through(method, weights: Layer, x, view: LayerCache, rows: Rows):
        weights = intervened(weights, interventions, rows.index, canvas.step)
        x, view = method(weights, x, view, rows, canvas)
        if isinstance(weights, IntervenedLayer):
            weights.check_reached(policy.layer.__qualname__)
        return x, view

    first, again = (
        traced_once(functools.partial(through, method), params) for method in (layer, policy._repair)
    )
    view_of = lambda cache, index: LayerCache.of(cache, index, model.kernels, readable)

    # A policy may run some layers in another phase than the step's, which is static.
    phase_at = lambda index: policy._phase_of_layer(rows.phase, index, model.spec) if rows.phase else ""

    def run(running: Rows, weights: Layer, carry):
        x, cache = carry
        phase = phase_at(weights.index if isinstance(weights.index, int) else None)
        here = dataclasses.replace(running, phase=phase)
        x, view = first(weights, x, view_of(cache, weights.index), here)
        return x, view.into(cache, weights.index)

    def repair(weights: Layer, carry):
        def change(carry):
            x, cache = carry
            x, view = again(weights, x, view_of(cache, weights.index), rows)
            return x, view.into(cache, weights.index)

        needed = policy._repairs(carry[1], canvas, weights.index)
        return carry if needed is None else when(jnp.any(needed), change, carry, name=REFRESH)

    if generation.plan.sampler.draft_adapter:
        params = acting_in(params, ~canvas.causal[:, 0], model.spec.layers)
    x = embed(params, rows.take(tokens), None if embeds is None else rows.take(embeds))
    x = embedded(interventions, x, rows.index, canvas.step)
    start = x if branches is None else (x, branches.embedded(params, embeds))
    rope = rope.padded(canvas.valid, model.spec)
    through_all = functools.partial(walk, params, model.spec, rope, kernels=model.kernels, where_used=True)

    def run_part(running: Rows, layers: range, carry):
        apart = layers.start == 0 and phase_at(0) != phase_at(None)
        return through_all(functools.partial(run, running), carry, first_apart=apart, layers=layers)

    at = functools.partial(layer_at, params, model.spec, rope, kernels=model.kernels)
    x, cache = run_with_exits(policy, canvas, run_part, at, (start, cache), rows)

    # Whether layers run again is decided once per step: no layer waits for it.
    more = None if rows.full else policy._repairs(cache, canvas, model.spec.layers - 1)
    if more is not None:
        x, cache = when(jnp.any(more), functools.partial(through_all, repair), (x, cache), name=REFRESH)
    return x if branches is None else jnp.concatenate(x, axis=1), cache


def run_with_exits(
    policy: Policy,
    canvas: Canvas,
    run_part: Callable[[Rows, range, Carry], Carry],
    layer_at: Callable[[int], Layer],
    carry: Carry,
    rows: Rows,
) -> Carry:
    """Runs the layers in parts, between which positions leave; returns the stream of all rows and the cache.

    Args:
      policy: Policy of the run, which names the layers that positions leave before (`Policy._exits`).
      canvas: State before the step.
      run_part: Function that runs some layers over rows.
      layer_at: Function that returns a layer.
      carry: Residual stream at the rows, and the cache.
      rows: Positions that the step computes.
    """
    running, begins, count = rows, 0, canvas.spec.layers
    for end in policy._exits(canvas.spec):
        x, cache = run_part(running, range(begins, end), carry)
        x, cache, running = policy._exit(layer_at(end) if end < count else None, x, cache, running, canvas)
        carry, begins = (x, cache), end
    x, cache = run_part(running, range(begins, count), carry)
    if running.index.shape != rows.index.shape:
        x = scatter(jnp.zeros((*rows.index.shape, x.shape[2]), x.dtype), rows.slot(running.index), x)
    return x, cache


def network_inputs(plan: Plan, canvas: Canvas) -> Int[Array, "streams_b l"]:
    """Tokens fed to the network; the unconditional stream sees its prompt masked."""
    if plan.streams == 1:
        return canvas.tokens
    unconditional = jnp.arange(canvas.tokens.shape[0])[:, None] % plan.streams == 1
    in_prompt = canvas.position < canvas.layout.prompt
    return jnp.where(unconditional & in_prompt, canvas.spec.mask_id, canvas.tokens)
