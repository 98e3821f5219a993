"""The state before the first step: the canvas, the policy's storage, and what features keep."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dllm_jax.engine.block_schedule import advance
from dllm_jax.engine.drafts import Predictions
from dllm_jax.engine.features.constraints import Constrained
from dllm_jax.engine.generation import Generation, Inputs, Plan, State
from dllm_jax.engine.step import network_inputs, select_positions
from dllm_jax.nn.layer import embed
from dllm_jax.nn.mesh import constrain
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy, begun
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.contexts import new_canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import repeat


def initial_state(generation: Generation, inputs: Inputs) -> State:
    """The state before the first step."""
    model, plan = generation.model, generation.plan
    canvas = initial_canvas(generation, inputs)
    cache, canvas = initial_cache(generation, canvas)
    extra, cache = cache.take_extra_positions(canvas, plan.streams)
    record = {feature.name: feature.begin(canvas, generation, extra) for feature in plan.features}
    remembered = plan.sampler.init(canvas)
    if plan.drafting:
        remembered = Predictions.none(canvas)
    memory = jax.tree.map(lambda array: constrain(array, model.rules, "b"), remembered)
    return State(canvas, cache, select_positions(generation, cache, canvas), record, memory)


def initial_canvas(generation: Generation, inputs: Inputs) -> Canvas:
    """The canvas at the first block that has something to do."""
    model, plan = generation.model, generation.plan
    tokens, valid = (constrain(array, model.rules, "bl") for array in (inputs.tokens, inputs.valid))
    canvas = new_canvas(tokens, valid, model.spec, plan.layout)
    for feature in plan.acting:
        canvas = feature.begin_canvas(canvas)
    if plan.sampler.procedure.edits:
        canvas = dataclasses.replace(canvas, keeps_block=jnp.zeros_like(canvas.done))
    return advance(canvas, plan.policy, plan.sampler, plan.acting)


def initial_cache(generation: Generation, canvas: Canvas) -> tuple[Cache, Canvas]:
    """The policy's storage, and the canvas, after what is computed or reused before the first step.

    With classifier-free guidance the network and the cache see both streams, the sampler one canvas.
    """
    model, plan = generation.model, generation.plan
    streams = repeat(canvas, plan.streams)
    batch = len(streams.tokens)
    cache = empty_cache(model, plan.policy, plan.layout, batch)
    if cache.no_output is not None:
        check_outputs(plan, model.spec)
    for feature in plan.acting:
        cache, canvas = feature.fill_cache(generation, cache, canvas)
    streams = repeat(canvas, plan.streams)
    x = embed(model.params, network_inputs(plan, streams), generation.embeds)
    cache = begun(plan.policy, cache, streams, model, x, plan.interventions)
    return split_cache(cache, model, batch), canvas


def check_outputs(plan: Plan, spec: ModelSpec):
    """Raises ValueError for options that need the output of every computed position.

    Layers of the policy let some positions go, which then have none (`Cache.no_output`).
    """
    name = type(plan.policy).__name__
    for option, unsupported, reason in (
        (
            type(plan.sampler).__name__,
            plan.sampler.procedure.edits,
            "it edits tokens by their outputs",
        ),
        ("cfg_scale", plan.streams == 2, "the two streams may let different positions go"),
        ("early_commit", bool(plan.sampler.early_commit), "it needs the outputs of all masks"),
        (
            "constraints",
            Constrained.name in plan.by_name,
            "the positions that they wait for may be let go",
        ),
    ):
        if unsupported:
            other = "DelayedCache()" if spec.context.has_blocks else "DualCache()"
            raise ValueError(f"{option} is not supported by {name}: {reason}. Use {other}.")


def split_cache(cache: Cache, model: Model, batch: int) -> Cache:
    """The cache as a mesh splits it: by sequence and KV head; unchanged without a mesh."""
    stacked = "" if model.layers_are_separate else "n"
    kinds = {model.spec.at(layer).kv_heads for layer in range(model.spec.layers)}

    def of_layers(array: Array) -> Array:
        # Keys and values have heads; what else is stored has the axes of the sequences and slots alone.
        has_heads = array.ndim == len(stacked) + 4 and array.shape[-2] in kinds
        return constrain(array, model.rules, f"{stacked}bskd" if has_heads else f"{stacked}b")

    def shared(array: Array) -> Array:
        of_sequences = array.ndim > 0 and array.shape[0] == batch
        return constrain(array, model.rules, "b") if of_sequences else array

    layers = jax.tree.map(of_layers, cache.layers)
    return Cache(layers, *jax.tree.map(shared, (cache.shared, cache.extra_positions, cache.no_output)))


def empty_cache(model: Model, policy: Policy, layout: Layout, batch: int) -> Cache:
    """The policy's storage before the first step, stacked or as a list of layers like the parameters."""
    cache = policy.init(model.spec, layout, batch, model.dtype)
    if not model.layers_are_separate:
        return cache
    separate, spec = cache.separate(), model.spec
    if spec.gemma is None or not separate.layers:
        return separate
    # Layers of the two kinds store pairs of different shapes.
    kinds = [spec.at(layer) for layer in range(spec.layers)]
    of_kind = {kind: policy.init(kind, layout, batch, model.dtype).separate().layers for kind in {*kinds}}
    return separate._replace(layers=[of_kind[kind][layer] for layer, kind in enumerate(kinds)])
