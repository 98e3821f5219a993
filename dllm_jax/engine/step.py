"""One denoising step: rows, network, decision, and the selection for the coming step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.branches import Branches, shadow_of
from dllm_jax.engine.decide import apply, decide
from dllm_jax.engine.generation import Generation, Plan, State, StepRecord
from dllm_jax.engine.stats import Record
from dllm_jax.engine.widths import Variant, at_end
from dllm_jax.nn import gemma
from dllm_jax.nn.intervention import IntervenedLayer, embedded, intervened
from dllm_jax.nn.layer import Layer, LayerIndex, embed, layer_at, walk
from dllm_jax.nn.low_rank import acting_in
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.rope import Rope
from dllm_jax.options.base import like
from dllm_jax.policies.base import Phase, Policy, PolicyLayer
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, compact_rows, full_rows, last_rows, one_stream, repeat
from dllm_jax.xla.loops import REFRESH, when
from dllm_jax.xla.stacks import traced_once

# -- a step by its stages: forward, decide, observe, apply, grow -----------------------------------


def denoise_once(
    generation: Generation, variant: Variant, state: State, sequences: Int[Array, "b"]
) -> tuple[StepRecord, Cache, Record]:
    """One step of the sampler by one forward pass: its account, the cache, and what features keep of it."""
    plan, canvas = generation.plan, state.canvas
    read = plan.sampler.read_as(canvas, state.memory)
    streams, all_rows, hidden, passed = run_forward(generation, variant, state, read)
    # The conditional stream alone is sampled and counted.
    computed = dataclasses.replace(all_rows, index=one_stream(all_rows.index, 0, plan.streams))
    rows = passed.with_output(computed, plan.streams)
    decided = decide(generation, canvas, rows, hidden, state.memory, read.verifies)

    # The policy sees what was proposed before the canvas moves on.
    proposal = repeat(decided.proposal, plan.streams)
    cache = plan.policy.observe(passed, streams, all_rows, proposal)
    cache = like(plan.policy, "observe", cache, state.cache, "as before the step")
    after = apply(plan, canvas, decided)
    extra, cache = cache.take_extra_positions(canvas, plan.streams)
    left = after
    for feature in plan.acting:
        left = feature.resize(plan, canvas, left, decided.findings[feature.name], decided.proposal)

    reads = lambda: attended(plan.policy, state.cache, streams, all_rows)
    step = StepRecord(
        sequences=sequences,
        before=canvas,
        after=after,
        left=left,
        computed=computed.mask(),
        executed=executed_positions(variant, canvas),
        attended=lambda: one_stream(reads(), 0, plan.streams),
        extra=extra,
        decided=decided,
        branches=canvas.active,
    )
    return step, cache, decided.added_to(plan, state.record, canvas, after)


def run_forward(
    generation: Generation, variant: Variant, state: State, read: Canvas
) -> tuple[Canvas, Rows, Float[Array, "streams_b q m"], Cache]:
    """Runs the network over the selected positions; K/V of the others come from the policy's cache.

    Args:
      generation: Constants of the loop.
      variant: Kind of step.
      state: State before the step.
      read: Canvas as the network reads it.

    Returns:
      the canvas that was read, the computed rows, the residual stream there after the last layer, and the
      cache as the layers left it; all of all streams.
    """
    plan = generation.plan
    streams = repeat(read, plan.streams)
    rows = computed_rows(state.need, variant, streams, plan.policy)
    shadow = shadow_of(plan.sampler, streams)
    soft = state.memory.soft if plan.sampler.procedure.of_noise else None
    tokens = network_inputs(plan, streams)
    hidden, cache = network(generation, tokens, streams, rows, state.cache, shadow, soft)
    return streams, rows, hidden, cache


def attended(policy: Policy, cache: Cache, canvas: Canvas, rows: Rows) -> Bool[Array, "b l"]:
    """Marks the positions that a step attends to.

    Args:
      policy: Cache policy of the run.
      cache: Cache before the step.
      canvas: State before the step.
      rows: Positions that the step computes.
    """
    read = policy.reads(cache, canvas) & canvas.valid
    read &= ~policy._evicted(cache, canvas) | rows.mask()
    # Masks of blocks and causal ones leave the last position the most.
    last = jnp.max(jnp.where(rows.real, rows.index, 0), axis=1, keepdims=True)
    mask = canvas.attends(Rows(last, rows.length), read)
    assert mask is not None, "of a set"
    return mask[:, 0, 0]


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
    for feature in plan.acting:
        selected = feature.select(canvas, selected)
    return repeat(selected & canvas.active[:, None], plan.streams)


# -- the network of one step -----------------------------------------------------------------------


Carry = tuple[Any, Cache]  # residual stream, with branches a pair of them, and the cache


def computed_rows(need: Bool[Array, "b l"], variant: Variant, canvas: Canvas, policy: Policy) -> Rows:
    """The rows of one step: in place on the canvas, or of the variant's width, which holds them all.

    These are gathered, unless the policy's selections lie at the end of the canvas (`Phase.at_end`).
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
    soft: Float[Array, "b c m"] | None = None,
) -> tuple[Float[Array, "b q_plus_s m"], Cache]:
    """Runs the rows through all layers; the stacked cache is part of the carry and is written in place.

    Args:
      generation: the constants.
      tokens: input ids, of all streams' sequences, as are the others.
      canvas: state before the step.
      rows: Positions to compute.
      cache: the policy's.
      branches: Further canvases of each sequence; None if there are none.
      soft: Embeddings that the last step expected in the block, of models that denoise noise; else None.

    Returns:
      the residual stream at the rows after the last layer, after it that of the branches, and the changed
      cache.

    Raises:
      ValueError: the policy's layer never passes a place that an intervention changes.
    """
    policy = generation.plan.policy

    # What layers may attend to is decided before the first of them, like the rows.
    readable = policy.readable(cache, canvas)
    cache = policy.before_layers(cache, canvas, rows)
    layer = branches.over(policy.layer) if branches else policy.layer
    layers = StepLayers.of(generation, canvas, readable, layer)
    x = layers.embedded(rows, tokens, generation.embeds, soft)
    if not branches:
        return policy.network(layers, x, cache, rows, canvas)
    streams: Any = x, branches.embedded(layers.params, generation.embeds)
    streams, cache = policy.network(layers, streams, cache, rows, canvas)
    return jnp.concatenate(streams, axis=1), cache


@dataclasses.dataclass(frozen=True)
class StepLayers:
    """The layers of one step, as functions of the residual stream and the cache (`policies.Layers`).

    Attributes:
      generation: the constants.
      params: Parameters of the model, as they act in this step.
      rope: Rotary tables of the step.
      canvas: state before the step.
      readable: Positions that may be attended to; None for all but padding.
      layer: Policy's layer, with interventions.
    """

    generation: Generation
    params: Params
    rope: Rope
    canvas: Canvas
    readable: Bool[Array, "b l"] | None
    layer: Callable[..., tuple[Any, LayerCache]]

    @staticmethod
    def of(
        generation: Generation,
        canvas: Canvas,
        readable: Bool[Array, "b l"] | None,
        layer: Callable[..., tuple[Any, LayerCache]],
    ) -> "StepLayers":
        """The layers of a step, traced once however often they run."""
        model, plan = generation.model, generation.plan
        params = model.params
        if plan.sampler.procedure.draft_adapter:
            params = acting_in(params, ~canvas.causal[:, 0], model.spec.layers)
        params = gemma.in_pass(params, canvas.causal)
        rope = generation.rope.padded(canvas.valid, model.spec)
        return StepLayers(generation, params, rope, canvas, readable, traced_layer(generation, canvas, layer))

    def embedded(
        self,
        rows: Rows,
        tokens: Int[Array, "b l"],
        embeds: Float[Array, "b l m"] | None,
        soft: Float[Array, "b c m"] | None = None,
    ) -> Float[Array, "b q m"]:
        """The residual stream at the rows before the first layer."""
        x = embed(self.params, rows.take(tokens), jax.tree.map(rows.take, embeds))
        if soft is not None:
            place = jnp.clip(rows.index - self.canvas.block_start[:, None], 0, soft.shape[1] - 1)
            soft = jnp.take_along_axis(soft, place[..., None], axis=1)
            x = gemma.conditioned(self.params, self.canvas.spec, x, soft, self.canvas.causal)
        return embedded(self.generation.plan.interventions, x, rows.index, self.canvas.step)

    def run(self, x: Any, cache: Cache, rows: Rows, layers: range | None = None) -> Carry:
        """Runs layers over rows; the policy may run some of them in another phase than the step's."""
        spec, policy = self.generation.model.spec, self.generation.plan.policy
        layers = range(spec.layers) if layers is None else layers
        phase = next((phase for phase in policy.phases if phase.name == rows.phase), Phase())
        kind_at = lambda index: phase.kind_at(index, spec)
        apart = layers.start == 0 and kind_at(0) != kind_at(None)

        def run_layer(weights: Layer, carry: Carry) -> Carry:
            x, cache = carry
            index = weights.index if isinstance(weights.index, int) else None
            here = dataclasses.replace(rows, phase=kind_at(index))
            x, view = self.layer(weights, x, self._view(cache, weights.index), here)
            return x, view.into(cache, weights.index)

        return self._walk(run_layer, (x, cache), first_apart=apart, layers=layers)

    def rerun(
        self,
        x: Any,
        cache: Cache,
        rows: Rows,
        layer: PolicyLayer,
        needed: Callable[[Cache, LayerIndex], Bool[Array, "b"]],
    ) -> Carry:
        """Runs layers again, in which some sequence needs it; none is run if the last one needs no other."""
        again = traced_layer(self.generation, self.canvas, layer)

        def run_layer(weights: Layer, carry: Carry) -> Carry:
            def change(carry: Carry) -> Carry:
                x, cache = carry
                x, view = again(weights, x, self._view(cache, weights.index), rows)
                return x, view.into(cache, weights.index)

            return when(jnp.any(needed(carry[1], weights.entry)), change, carry, name=REFRESH)

        more = jnp.any(needed(cache, self.generation.model.spec.layers - 1))
        # XLA would carry the stored pairs through these loops in another order (jaxlib 0.12).
        ordered = lambda carry: (carry[0], carry[1].in_order(self.generation.model.kernels))
        through = lambda carry: ordered(self._walk(run_layer, ordered(carry)))
        return ordered(when(more, through, ordered((x, cache)), name=REFRESH))

    def at(self, index: int) -> Layer:
        """One layer, by itself, with interventions."""
        model, canvas, changes = self.generation.model, self.canvas, self.generation.plan.interventions
        layer = layer_at(self.params, model.spec, self.rope, index, model.kernels)
        return intervened(layer, changes, jnp.broadcast_to(canvas.position, canvas.tokens.shape), canvas.step)

    def _view(self, cache: Cache, index: LayerIndex) -> LayerCache:
        return LayerCache.of(cache, index, self.generation.model.kernels, self.readable)

    def _walk(self, run: Callable[[Layer, Carry], Carry], carry: Carry, **part: Any) -> Carry:
        model = self.generation.model
        return walk(self.params, model.spec, self.rope, run, carry, model.kernels, where_used=True, **part)


def traced_layer(
    generation: Generation, canvas: Canvas, layer: Callable[..., tuple[Any, LayerCache]]
) -> Callable[..., tuple[Any, LayerCache]]:
    """A function of a policy's layer, with interventions, which is traced once for all layers.

    Raises:
      ValueError: the function never passes a place that an intervention changes.
    """
    model, plan = generation.model, generation.plan

    def through(weights: Layer, x: Any, view: LayerCache, rows: Rows):
        weights = intervened(weights, plan.interventions, rows.index, canvas.step)
        # A layer sees the canvas under the spec of its kind, which says how far it attends.
        at = canvas if model.spec.gemma is None else dataclasses.replace(canvas, spec=weights.spec)
        x, view = layer(weights, x, view, rows, at)
        if isinstance(weights, IntervenedLayer):
            weights.check_reached(plan.policy.layer.__qualname__)
        return x, view

    return traced_once(through, model.params)


def network_inputs(plan: Plan, canvas: Canvas) -> Int[Array, "streams_b l"]:
    """Tokens fed to the network; the unconditional stream sees its prompt masked."""
    if plan.streams == 1:
        return canvas.tokens
    unconditional = jnp.arange(canvas.tokens.shape[0])[:, None] % plan.streams == 1
    in_prompt = canvas.position < canvas.layout.prompt
    return jnp.where(unconditional & in_prompt, canvas.spec.mask_id, canvas.tokens)
