"""One denoising step: rows, network, decision, and the selection for the coming step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.engine.branches import Branches, further_positions, shadow_of
from dllm_jax.engine.decide import apply, decide
from dllm_jax.engine.generation import Generation, Plan, State
from dllm_jax.engine.growth import grow
from dllm_jax.engine.records import Taken
from dllm_jax.engine.trace import attended
from dllm_jax.engine.widths import Variant, at_end
from dllm_jax.nn.intervened import IntervenedLayer, embedded, intervened
from dllm_jax.nn.layer import Layer, LayerIndex, embed, layer_at, walk
from dllm_jax.nn.low_rank import acting_in
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.rope import Rope
from dllm_jax.options.base import like
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, compact_rows, full_rows, last_rows, one_stream, repeat, scatter
from dllm_jax.xla.loops import REFRESH, when
from dllm_jax.xla.stacks import traced_once

# -- a step by its stages: forward, decide, observe, apply, grow -----------------------------------


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


# -- the network of one step -----------------------------------------------------------------------


Carry = tuple[Any, Cache]  # residual stream, with branches a pair of them, and the cache


def computed_rows(need: Bool[Array, "b l"], variant: Variant, canvas: Canvas, policy: Policy) -> Rows:
    """The rows of one step: in place on the canvas, or of the variant's width, which holds them all.

    These are gathered, unless the policy's selections lie at the end of the canvas (`Policy._at_end`).
    """
    width, phase = variant
    if width is None:
        return full_rows(need)
    if at_end(policy, canvas):
        return dataclasses.replace(last_rows(need, width), phase=phase)

    # A step that computes a finished block computes all of it, and more than that (`Canvas.without_final`).
    one_block = canvas.spec.context.in_one_block(width)
    return dataclasses.replace(compact_rows(need, width), in_one_block=one_block, phase=phase)


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
    policy = generation.plan.policy

    # What layers may attend to is settled before the first of them, like the rows.
    readable = policy.readable(cache, canvas)
    cache = policy.before_layers(cache, canvas, rows)
    layer = branches.over(policy.layer) if branches else policy.layer
    walker = Walker.of(generation, canvas, rows, readable, layer)
    start = walker.embedded(tokens, generation.embeds)
    streams = (start, branches.embedded(walker.params, generation.embeds)) if branches else start
    x, cache = walker.through((streams, cache))

    # Whether layers run again is decided once per step: no layer waits for it.
    if policy._runs_again and not rows.full:
        more = policy._repairs(cache, canvas, generation.model.spec.layers - 1)
        x, cache = when(jnp.any(more), walker.run_again, (x, cache), name=REFRESH)
    return jnp.concatenate(x, axis=1) if branches else x, cache


@dataclasses.dataclass(frozen=True)
class Walker:
    """The layers of one step, as functions of the residual stream and the cache.

    Attributes:
      generation: the constants.
      params: Parameters of the model, as they act in this step.
      rope: Rotary tables of the step.
      canvas: state before the step.
      rows: Positions to compute.
      readable: Positions that may be attended to; None for all but padding.
      first: Policy's layer, with interventions.
      again: Policy's layer in a repair.
    """

    generation: Generation
    params: Params
    rope: Rope
    canvas: Canvas
    rows: Rows
    readable: Bool[Array, "b l"] | None
    first: Callable[..., tuple[Any, LayerCache]]
    again: Callable[..., tuple[Any, LayerCache]]

    @staticmethod
    def of(
        generation: Generation,
        canvas: Canvas,
        rows: Rows,
        readable: Bool[Array, "b l"] | None,
        layer: Callable[..., tuple[Any, LayerCache]],
    ) -> "Walker":
        """The layers of a step, traced once however often they run."""
        model, plan = generation.model, generation.plan

        def through(method, weights: Layer, x, view: LayerCache, rows: Rows):
            weights = intervened(weights, plan.interventions, rows.index, canvas.step)
            x, view = method(weights, x, view, rows, canvas)
            if isinstance(weights, IntervenedLayer):
                weights.check_reached(plan.policy.layer.__qualname__)
            return x, view

        methods = (layer, plan.policy._repair)
        once = (traced_once(functools.partial(through, method), model.params) for method in methods)
        params = model.params
        if plan.sampler.draft_adapter:
            params = acting_in(params, ~canvas.causal[:, 0], model.spec.layers)
        rope = generation.rope.padded(canvas.valid, model.spec)
        return Walker(generation, params, rope, canvas, rows, readable, *once)

    def embedded(
        self, tokens: Int[Array, "b l"], embeds: Float[Array, "b l m"] | None
    ) -> Float[Array, "b q m"]:
        """The residual stream at the rows before the first layer."""
        x = embed(self.params, self.rows.take(tokens), jax.tree.map(self.rows.take, embeds))
        return embedded(self.generation.plan.interventions, x, self.rows.index, self.canvas.step)

    def through(self, carry: Carry) -> Carry:
        """Runs the layers in parts, between which positions leave (`Policy._exits`).

        Returns the stream of all rows, and the cache.
        """
        policy, spec, running, begins = self._policy, self.canvas.spec, self.rows, 0
        for end in policy._exits(spec):
            x, cache = self.run(running, range(begins, end), carry)
            layer = self.layer_at(end) if end < spec.layers else None
            x, cache, running = policy._exit(layer, x, cache, running, self.canvas)
            carry, begins = (x, cache), end
        x, cache = self.run(running, range(begins, spec.layers), carry)
        if running.index.shape != self.rows.index.shape:
            zeros = jnp.zeros((*self.rows.index.shape, x.shape[2]), x.dtype)
            x = scatter(zeros, self.rows.slot(running.index), x)
        return x, cache

    def run(self, rows: Rows, layers: range, carry: Carry) -> Carry:
        """Runs some layers over rows; the policy may run some of them in another phase than the step's."""
        phase_at = lambda index: self._policy._phase_of_layer(rows.phase, index, self.generation.model.spec)
        apart = bool(rows.phase) and layers.start == 0 and phase_at(0) != phase_at(None)

        def one(weights: Layer, carry: Carry) -> Carry:
            x, cache = carry
            index = weights.index if isinstance(weights.index, int) else None
            here = dataclasses.replace(rows, phase=phase_at(index) if rows.phase else "")
            x, view = self.first(weights, x, self._view(cache, weights.index), here)
            return x, view.into(cache, weights.index)

        return self._walk(one, carry, first_apart=apart, layers=layers)

    def run_again(self, carry: Carry) -> Carry:
        """Runs the layers again that the policy repairs (`Policy._repairs`)."""

        def one(weights: Layer, carry: Carry) -> Carry:
            def change(carry: Carry) -> Carry:
                x, cache = carry
                x, view = self.again(weights, x, self._view(cache, weights.index), self.rows)
                return x, view.into(cache, weights.index)

            needed = self._policy._repairs(carry[1], self.canvas, weights.index)
            return when(jnp.any(needed), change, carry, name=REFRESH)

        return self._walk(one, carry)

    def layer_at(self, index: int) -> Layer:
        """One layer, by itself."""
        return layer_at(
            self.params, self.generation.model.spec, self.rope, index, self.generation.model.kernels
        )

    @property
    def _policy(self) -> Policy:
        return self.generation.plan.policy

    def _view(self, cache: Cache, index: LayerIndex) -> LayerCache:
        return LayerCache.of(cache, index, self.generation.model.kernels, self.readable)

    def _walk(self, run: Callable[[Layer, Carry], Carry], carry: Carry, **part: Any) -> Carry:
        model = self.generation.model
        return walk(self.params, model.spec, self.rope, run, carry, model.kernels, where_used=True, **part)


def network_inputs(plan: Plan, canvas: Canvas) -> Int[Array, "streams_b l"]:
    """Tokens fed to the network; the unconditional stream sees its prompt masked."""
    if plan.streams == 1:
        return canvas.tokens
    unconditional = jnp.arange(canvas.tokens.shape[0])[:, None] % plan.streams == 1
    in_prompt = canvas.position < canvas.layout.prompt
    return jnp.where(unconditional & in_prompt, canvas.spec.mask_id, canvas.tokens)
