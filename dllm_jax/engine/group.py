"""Selects the sequences that a step runs.

A full step runs a small group, because one long sequence already saturates the device. A partial step runs
every sequence whose tokens fit the compiled width. A sequence can therefore start a block without forcing a
full step on the others. If a mesh splits the batch, each device runs a group of its own sequences.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from dllm_jax.engine.beginning import empty_cache
from dllm_jax.engine.generation import Generation, Plan, State
from dllm_jax.engine.stats import Record
from dllm_jax.engine.widths import Variant, exceeds, last_phase, narrowest
from dllm_jax.nn.hardware import CPU_POSITIONS
from dllm_jax.nn.intervention import of_sequences as interventions_of
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.candidates import noise_of
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import one_stream, repeat
from dllm_jax.xla.loops import apart_on_cpu


def group_size(policy: Policy, spec: ModelSpec, layout: Layout, platform: str) -> int:
    """How many sequences a full step runs: as many as it takes to saturate the device.

    Args:
      policy: without stored KV pairs every step is a full one unless answers grow, so that groups are never
        short of sequences, and more of them read the weights once.
      spec: Spec of the model.
      layout: the geometry.
      platform: Platform of the devices, as jax calls it.
    """
    # Positions that saturate a device (`saturating`), in a round number for all accelerators: programs do not
    # depend on the chip.
    reusing, not_reusing = (CPU_POSITIONS, 512) if platform == "cpu" else (512, 2048)
    if policy.stores(spec) or layout.initial:
        return -(-reusing // layout.length)
    return max(4, -(-not_reusing // layout.length))


def needs_full(plan: Plan, state: State) -> Bool[Array, "b"]:
    """Sequences whose coming step is a full one: it computes more than any width holds."""
    need = one_stream(state.need, 0, plan.streams)
    if not plan.widths:
        return jnp.ones(len(need), bool)
    return exceeds(plan.widths[-1], need, plan.policy, state.canvas)


def next_variant(plan: Plan, state: State) -> Int[Array, ""]:
    """The variant of the coming step: an index into `plan.variants`, of which the last is the full step.

    Groups are run as soon as there is a sequence for one, so that partial steps have the company of all; of
    several shares, once no device would run its group for nobody. A full step of the whole batch waits until
    no sequence can do without.
    """
    active, whole = state.canvas.active, needs_full(plan, state)
    partial = active & ~whole
    need = one_stream(state.need, 0, plan.streams) & partial[:, None]
    width = narrowest(plan.widths[:-1], need, plan.policy, state.canvas)
    streams, taking = repeat(state.canvas, plan.streams), repeat(partial, plan.streams)
    phase = last_phase(plan.phases, state.cache, streams, taking, plan.policy)
    full = ~jnp.any(partial)
    if full_step_batch(plan, len(active)) < len(active):
        any_of_share = lambda part: jnp.any(part.reshape(plan.shares, -1), axis=1)
        full |= jnp.all(any_of_share(active & whole) | ~any_of_share(active))
    return jnp.where(full, len(plan.variants) - 1, width * len(plan.phases) + phase)


def full_step_batch(plan: Plan, batch: int) -> int:
    """How many of the sequences a full step runs, of all shares."""
    return batch if plan.group is None else min(plan.group * plan.shares, batch)


def takes_part(plan: Plan, variant: Variant, state: State) -> Bool[Array, "b"]:
    """The sequences that a step of this variant is for."""
    whole = needs_full(plan, state)
    return state.canvas.active & (whole if variant.is_full else ~whole)


# -- a state of few sequences ----------------------------------------------------------------------------


def choose_group(part: Bool[Array, "b"], canvas: Canvas, plan: Plan) -> Int[Array, "g"]:
    """The sequences of each share's group: those that take part and have made the fewest steps, else any."""
    # Another one that fills the group takes no part in the step.
    behind = jnp.where(part, canvas.step, jnp.iinfo(jnp.int32).max)
    size = full_step_batch(plan, len(part))
    if plan.shares == 1:
        return jax.lax.top_k(-behind, size)[1].astype(jnp.int32)
    within = jax.lax.top_k(-behind.reshape(plan.shares, -1), size // plan.shares)[1]
    return (within + share_starts(plan.shares, len(part))).reshape(-1).astype(jnp.int32)


def gather_constants(generation: Generation, index: Int[Array, "g"]) -> Generation:
    """The constants of the group's sequences."""
    plan, both = generation.plan, stream_index(index, generation.plan)
    part = lambda tree, index: jax.tree.map(lambda a: gather_sequences(a, index, 0, plan.shares), tree)
    return generation._replace(
        plan=dataclasses.replace(plan, interventions=interventions_of(plan.interventions, both)),
        noise=noise_of(generation.noise, index),
        embeds=part(generation.embeds, both),
        allowed=part(generation.allowed, index),
    )


def gather_state(generation: Generation, state: State, index: Int[Array, "g"], axes: Cache) -> State:
    """The state of the group's sequences; a step writes to the record of all by sequence (`of_group`)."""
    plan = generation.plan
    places = {1: index, plan.streams: stream_index(index, plan)}
    of_group = lambda copies, axis, array: gather_sequences(array, places[copies], axis, plan.shares)
    whole, state = record_of_all(plan, state)
    group_state = map_arrays(of_group, plan, axes, state)
    return group_state._replace(record=group_state.record | whole)


def write_back(
    generation: Generation, state: State, group_state: State, index: Int[Array, "g"], axes: Cache
) -> State:
    """The state of all sequences after a step of the group's."""
    plan = generation.plan
    places = {1: index, plan.streams: stream_index(index, plan)}
    back = lambda copies, axis, array, part: scatter_sequences(array, part, places[copies], axis, plan.shares)
    (_, state), (of_all, group_state) = (record_of_all(plan, part) for part in (state, group_state))
    whole = map_arrays(back, plan, axes, state, group_state)
    return whole._replace(record=whole.record | of_all)


def record_of_all(plan: Plan, state: State) -> tuple[Record, State]:
    """Takes what features keep of all sequences out of a state, in steps of any group."""
    features = plan.by_name
    of_all = {name: entry for name, entry in state.record.items() if not features[name].of_group}
    rest = {name: entry for name, entry in state.record.items() if name not in of_all}
    return of_all, state._replace(record=rest)


def map_arrays(function: Callable[..., Array], plan: Plan, axes: Cache, *states: State) -> State:
    """A state made of others array by array.

    Args:
      function: Function of the number of entries per sequence (one, or one per stream), of the axis, and of
        the arrays.
      plan: Plan of the states.
      axes: Axes returned by `axes_of_sequences`.
      *states: States of any numbers of sequences.
    """
    of_sequences = lambda *trees, axis=0: jax.tree.map(functools.partial(function, 1, axis), *trees)
    of_streams = functools.partial(function, plan.streams)
    features = plan.by_name
    record = {
        name: of_sequences(*(state.record[name] for state in states), axis=features[name].axis)
        for name in states[0].record
    }
    return State(
        of_sequences(*(state.canvas for state in states)),
        jax.tree.map(of_streams, axes, *(state.cache for state in states)),
        of_streams(0, *(state.need for state in states)),
        record,
        of_sequences(*(state.memory for state in states)),
    )


def stream_index(index: Int[Array, "g"], plan: Plan) -> Int[Array, "streams_g"]:
    """The places of the group's sequences among those of all streams."""
    return (index[:, None] * plan.streams + jnp.arange(plan.streams)).reshape(-1)


def gather_sequences(
    array: Shaped[Array, "..."], index: Int[Array, "g"], axis: int, shares: int = 1
) -> Shaped[Array, "..."]:
    """The array of these sequences; of a single one by a slice, which XLA makes in place of a gather."""
    if len(index) > shares:
        several = lambda array, index: jnp.take(array, index, axis=axis, mode="clip")
        return map_shares(several, axis, shares, index, array)
    slices = lambda array, at: jax.lax.dynamic_slice_in_dim(array, jnp.squeeze(at), 1, axis)
    slice_at = lambda array, at: map_shares(slices, axis, shares, at, array)
    at = index[0] if shares == 1 else index
    if array.ndim < 3:
        return slice_at(array, at)
    return apart_on_cpu(slice_at, array, at)


def scatter_sequences(
    array: Shaped[Array, "..."], new: Shaped[Array, "..."], index: Int[Array, "g"], axis: int, shares: int = 1
) -> Shaped[Array, "..."]:
    """The array with new values of these sequences; a place after the last is none."""
    if len(index) == 1:
        return jax.lax.dynamic_update_slice_in_dim(array, new, index[0], axis)
    put = lambda array, new, index: array.at[(slice(None),) * axis + (index,)].set(new, mode="drop")
    return map_shares(put, axis, shares, index, array, new)


def map_shares(
    function: Callable[..., Array],
    axis: int,
    shares: int,
    index: Int[Array, "*g"],
    *arrays: Shaped[Array, "..."],
) -> Shaped[Array, "..."]:
    """`function(*arrays, index)` of each share by itself, by places within it: nothing leaves its device."""
    if shares == 1:
        return function(*arrays, index)
    before, count, behind = arrays[0].shape[:axis], arrays[0].shape[axis], arrays[0].shape[axis + 1 :]
    split = (array.reshape(*before, shares, -1, *behind) for array in arrays)
    within = index.reshape(shares, -1) - share_starts(shares, count)
    of_each = jax.vmap(function, (*[axis] * len(arrays), 0), axis)(*split, within)
    return of_each.reshape(*before, -1, *behind)


def share_starts(shares: int, count: int) -> Int[Array, "shares 1"]:
    """The first place of each share, of so many places."""
    return jnp.arange(shares, dtype=jnp.int32)[:, None] * (count // shares)


def axes_of_sequences(model: Model, plan: Plan, batch: int) -> Cache:
    """The axis of sequences of each array of the cache, in its place: the one that grows with the batch.

    Raises:
      ValueError: an array of the policy's has none.
    """
    empty = functools.partial(empty_cache, model, plan.policy, plan.layout)

    def grows(array: jax.ShapeDtypeStruct, more: jax.ShapeDtypeStruct) -> int:
        if array.shape == more.shape:
            raise ValueError(
                f"policy={type(plan.policy).__name__}() stores an array of shape {array.shape} for all "
                "sequences together: a step may run a few of them. Give it an axis of length `batch`."
            )
        return next(i for i, (a, b) in enumerate(zip(array.shape, more.shape, strict=True)) if a != b)

    described = (jax.eval_shape(functools.partial(empty, size)) for size in (batch, batch + 1))
    return jax.tree.map(grows, *described)
