"""One denoising step: run the selected positions, choose among their candidates, update the canvas."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.engine.block_schedule import advance, end_step, offered_positions
from dllm_jax.engine.branches import shadow_block
from dllm_jax.engine.drafting import Predictions, branch_count, further_positions
from dllm_jax.engine.generation import Generation, State
from dllm_jax.engine.group import (
    axes_of_sequences,
    choose_group,
    full_step_batch,
    gather_constants,
    gather_state,
    takes_part,
    write_back,
)
from dllm_jax.engine.logprobs import LogProbs
from dllm_jax.engine.network import computed_rows, network, network_inputs
from dllm_jax.engine.plan import Inputs, Plan
from dllm_jax.engine.prefix import reuse, reused_of
from dllm_jax.engine.propose import propose
from dllm_jax.engine.stats import Record
from dllm_jax.engine.stops import begin_reading
from dllm_jax.engine.trace import attended
from dllm_jax.engine.verifying import verify_drafts
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.layer import embed
from dllm_jax.nn.mesh import constrain
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas, begin, repeat, revoke, stream, write
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import gather, places, spread


def initial_state(generation: Generation, inputs: Inputs) -> State:
    """The state before the first step."""
    model, plan = generation.model, generation.plan
    tokens, valid = (constrain(array, model.rules, "bl") for array in (inputs.tokens, inputs.valid))
    layout, streams_b = plan.layout, plan.streams * tokens.shape[0]

    # With classifier-free guidance the network and the cache see both streams, the sampler one canvas.
    canvas = begin(tokens, valid, model.spec, layout)
    if plan.stop or plan.stop_texts is not None:
        canvas = dataclasses.replace(canvas, stop=jnp.full(len(tokens), layout.length, jnp.int32))
    if plan.stop_texts is not None:
        canvas = begin_reading(canvas)
    if plan.sampler.edits:
        canvas = dataclasses.replace(canvas, keeps_block=jnp.zeros_like(canvas.done))
    if plan.drafting is not None:
        canvas = dataclasses.replace(canvas, forwards=canvas.step)
    canvas = advance(canvas, plan.policy, plan.sampler, plan.stop_at_eos)
    streams = repeat(canvas, plan.streams)

    # The policy may run the model over the request before the first step.
    cache = empty_cache(model, plan.policy, layout, streams_b)
    if cache.no_output is not None:
        check_outputs(plan, model.spec)
    if plan.prefix is not None:
        cache, canvas = reuse(cache, canvas, plan.prefix, model, generation.rope, plan.policy)
        streams = canvas
    x = embed(model.params, network_inputs(plan, streams), generation.embeds)
    cache = plan.policy.before_first_step(cache, streams, model, x)
    cache = split_cache(cache, model, streams_b)
    extra, cache = take_extra_positions(cache, plan.streams)
    traced = plan.step_limit if plan.trace else None
    record = Record.begin(canvas, traced, plan.confidence, extra, plan.sampler.may_idle)
    if plan.prefix is not None:
        record = record._replace(reused=reused_of(canvas, model))
    if plan.drafting is not None:
        record = record._replace(branches=jnp.zeros_like(canvas.step))
    if plan.logprobs is not None:
        record = record._replace(logprobs=LogProbs.begin(canvas, plan.logprobs))
    kept = plan.sampler.init(canvas) if plan.drafting is None else Predictions.none(canvas)
    memory = jax.tree.map(lambda array: constrain(array, model.rules, "b"), kept)
    return State(canvas, cache, select_positions(generation, cache, canvas), record, memory)


def check_outputs(plan: Plan, spec: ModelSpec):
    """Raises ValueError for options that need the output of every computed position.

    Layers of the policy let some positions go, which then have none (`Cache.no_output`).
    """
    name = type(plan.policy).__name__
    for option, unsupported, reason in (
        (
            type(plan.sampler).__name__,
            plan.sampler.edits,
            "it edits tokens by their outputs",
        ),
        ("cfg_scale", plan.streams == 2, "the two streams may let different positions go"),
        ("early_commit", plan.sampler.early_commit is not None, "it needs the outputs of all masks"),
        ("constraints", bool(plan.constraints), "the positions that they wait for may be let go"),
    ):
        if unsupported:
            other = "DelayedCache()" if spec.block_size else "DualCache()"
            raise ValueError(f"{option} is not supported by {name}: {reason}. Use {other}.")


def split_cache(cache: Cache, model: Model, batch: int) -> Cache:
    """The cache as a mesh splits it: by sequence and KV head; unchanged without a mesh."""
    stacked = "" if model.layers_are_separate else "n"

    def of_layers(array: Array) -> Array:
        # Keys and values have heads; what else is stored has the axes of the sequences and slots alone.
        has_heads = array.ndim == len(stacked) + 4 and array.shape[-2] == model.spec.kv_heads
        return constrain(array, model.rules, f"{stacked}bskd" if has_heads else f"{stacked}b")

    def shared(array: Array) -> Array:
        of_sequences = array.ndim > 0 and array.shape[0] == batch
        return constrain(array, model.rules, "b") if of_sequences else array

    layers = jax.tree.map(of_layers, cache.layers)
    return Cache(layers, *jax.tree.map(shared, (cache.shared, cache.extra_positions, cache.no_output)))


def empty_cache(model: Model, policy: Policy, layout: Layout, batch: int) -> Cache:
    """The policy's storage before the first step, stacked or as a list of layers like the parameters."""
    cache = policy.init(model.spec, layout, batch, model.dtype)
    return cache.separate() if model.layers_are_separate else cache


def take_extra_positions(cache: Cache, streams: int) -> tuple[Float[Array, "b n"] | None, Cache]:
    """The extra positions of the conditional stream, and the cache with their count at zero."""
    if (extra := cache.extra_positions) is None:
        return None, cache
    return stream(extra, 0, streams), cache._replace(extra_positions=jnp.zeros_like(extra))


def select_positions(generation: Generation, cache: Cache, canvas: Canvas) -> Bool[Array, "streams_b l"]:
    """The policy's selection for the coming step, empty in inactive sequences.

    With guidance both streams compute what the conditional one selects: they predict the same positions.
    """
    plan = generation.plan
    canvas = dataclasses.replace(canvas, planned_order=plan.sampler.planned(canvas, generation.noise))
    selected = stream(plan.policy.select(cache, repeat(canvas, plan.streams)), 0, plan.streams)
    selected = canvas.without_final(selected)
    if plan.drafting is not None and plan.drafting.eager:
        selected |= further_positions(plan, canvas)
    return repeat(selected & canvas.active[:, None], plan.streams)


def step(generation: Generation, variant: Variant, state: State) -> State:
    """One denoising step of the sequences that it is for; the others stay as they are, and count none.

    Args:
      generation: the constants.
      variant: Kind of step, static.
      state: before the step.
    """
    plan = generation.plan
    part = takes_part(plan, variant, state)
    if variant.width is not None or full_step_batch(plan, len(part)) == len(part):
        return _step(generation, variant, _only(state, part, plan))
    group = choose_group(part, state.canvas, plan)
    axes = axes_of_sequences(generation.model, plan, len(state.need))
    group_state = _only(gather_state(generation, state, group, axes), part[group], plan)
    after = _step(gather_constants(generation, group), variant, group_state, group)

    # What only fills the group is not written back, even if a policy's layer changes it.
    return write_back(generation, state, after, jnp.where(part[group], group, len(part)), axes)


def _only(state: State, part: Bool[Array, "b"], plan: Plan) -> State:
    """The state in which only these sequences are active, and need anything."""
    canvas = dataclasses.replace(state.canvas, active=part)
    return state._replace(canvas=canvas, need=state.need & repeat(part, plan.streams)[:, None])


def _step(
    generation: Generation, variant: Variant, state: State, sequences: Int[Array, "b"] | None = None
) -> State:
    """Runs a step of the active sequences of a state, whose places in the trace are `sequences`."""
    if branch_count(generation.plan, variant.width, state.canvas.spec) > 1:
        after, cache, record, memory = verify_drafts(generation, variant, state, sequences)
        return State(after, cache, select_positions(generation, cache, after), record, memory)
    canvas, plan = state.canvas, generation.plan
    policy, sampler = plan.policy, plan.sampler
    read = sampler.read_as(canvas, state.memory)
    streams = repeat(read, plan.streams)

    # The network runs over the selected positions; K/V of the others come from the policy's cache.
    rows = computed_rows(state.need, variant, canvas.spec, policy)
    shadow = None
    if sampler.verifies or (sampler.verifies_causally and not canvas.spec.shifted):
        shadow = shadow_block(streams, sampler.verifies_causally)
    hidden, cache = network(generation, network_inputs(plan, streams), streams, rows, state.cache, shadow)

    # Candidates get a token and a score; the sampler decides which of the eligible ones are decoded now. What
    # layers let go has no output, and is no candidate.
    own = dataclasses.replace(rows, index=stream(rows.index, 0, plan.streams))
    ended = own if cache.no_output is None else own.where(~own.take(stream(cache.no_output, 0, plan.streams)))
    candidates, finite, committed, found, end = propose(generation, canvas, ended, hidden, read.verifying)
    canvas = canvas.ending_block(end)
    index, token, score, _ = candidates
    eligible = gather(offered_positions(policy, canvas), index)
    masks, delayed = sampler.delay(candidates._replace(score=jnp.where(eligible, score, -jnp.inf)), canvas)
    kept = state.memory if plan.drafting is None else ()
    chosen, memory, revoked, keeps_block, other = sampler.decide(masks, kept, canvas, generation.noise)
    token = token if other is None else other
    if committed is not None:
        chosen |= committed[:, None] & (score > -jnp.inf)
        revoked = None if revoked is None else revoked & ~committed[:, None]
    place = places(index, canvas.layout.length)
    proposal = Proposal(
        spread(token, place, canvas.spec.mask_id),
        spread(score.astype(jnp.float32), place, -jnp.inf),
        None if delayed is None else spread(delayed, place, False),
    )

    # The policy sees what was proposed before the canvas moves on.
    cache = policy.observe(cache, streams, rows, repeat(proposal, plan.streams))
    after = write(canvas, spread(chosen & finite[:, None], place, False), proposal.token)
    if revoked is not None:
        after = revoke(after, spread(revoked & finite[:, None], place, False))
    if keeps_block is not None and canvas.keeps_block is not None:
        after = dataclasses.replace(
            after, keeps_block=jnp.where(canvas.active, keeps_block, canvas.keeps_block)
        )
    if committed is not None:
        after = dataclasses.replace(after, done=after.done | committed)
    after = end_step(plan, after, finite)
    if plan.drafting is not None:
        memory = Predictions(proposal._replace(delayed=None), jnp.zeros_like(canvas.step))
        after = dataclasses.replace(after, forwards=canvas.passes + canvas.active)

    # Statistics count the conditional stream alone; then the policy selects for the coming step.
    extra, cache = take_extra_positions(cache, plan.streams)
    ran = jnp.sum(canvas.valid) if variant.width is None else variant.width * len(canvas.tokens)
    read = stream(attended(policy, state.cache, streams, rows), 0, plan.streams)
    record = state.record.add(canvas, after, own.mask(), ran, read, extra, finite, proposal, sequences)
    if record.logprobs is not None and found is not None:
        record = record._replace(logprobs=record.logprobs.add(canvas, after, found, place))
    if record.branches is not None:
        record = record._replace(branches=record.branches + canvas.active)
    return State(after, cache, select_positions(generation, cache, after), record, memory)
