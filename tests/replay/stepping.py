"""A run step by step: the state after every step, and what a policy's layers did in it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import dllm_jax as dj
from dllm_jax.decoding.request import prepare, prepare_infill
from dllm_jax.engine.features.trace import RecordedSteps, Trace
from dllm_jax.engine.generation import Generation, Inputs, Plan, State
from dllm_jax.engine.group import next_variant
from dllm_jax.engine.loop import step
from dllm_jax.engine.pieces import begin_pieces
from dllm_jax.engine.step import computed_rows, network
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.arithmetic import cosine
from dllm_jax.nn.layer import unembed
from dllm_jax.state.rows import scatter


class Log(NamedTuple):
    """What the layers of one step did.

    Attributes:
      fed: positions that passed through the network.
      hidden: the residual stream of the positions as they leave the last layer.
      stale: positions whose keys and branch outputs were recomputed, under policies on `DLLMCache`.
      similarity: new and stored values compared, where fed, under the same.
    """

    fed: Bool[Array, "b l"]
    hidden: Float[Array, "b l m"]
    stale: Bool[Array, "n b l"]
    similarity: Float[Array, "n b l"]


class _Logging:
    """Mixin for policies: `Cache.shared` becomes (the policy's own, the log)."""

    def init(self, spec, layout, batch: int, dtype: Any):
        cache, places = super().init(spec, layout, batch, dtype), (batch, layout.length)
        log = Log(
            jnp.zeros(places, bool), jnp.zeros((*places, spec.width), dtype),
            jnp.zeros((spec.layers, *places), bool), jnp.zeros((spec.layers, *places)),
        )  # fmt: skip
        return cache._replace(shared=(cache.shared, log))

    def _evicted(self, cache, canvas):
        return super()._evicted(cache._replace(shared=cache.shared[0]), canvas)

    def before_first_step(self, cache, canvas, model, x, interventions=()):
        own, log = cache.shared
        cache = super().before_first_step(cache._replace(shared=own), canvas, model, x, interventions)
        return cache._replace(shared=(cache.shared, log))

    def layer(self, layer, x, cache, rows, canvas):
        own, log = cache.shared
        cache = cache._replace(shared=own)
        if isinstance(self, dj.policies.DLLMCache):
            value, stored = layer.value(x), cache.read().v
            place = lambda a: scatter(jnp.zeros((a.shape[0], rows.length), a.dtype), rows.index, a)
            stale = place(self.stale(layer, value, cache, rows, canvas))
            similarity = place(cosine(value, rows.last(stored.shape[1]).take(stored)))
            log = log._replace(
                stale=log.stale.at[layer.index].set(stale),
                similarity=log.similarity.at[layer.index].set(similarity),
            )
        x, cache = super().layer(layer, x, cache, rows, canvas)
        log = log._replace(fed=rows.mask(), hidden=scatter(log.hidden, rows.index, x))
        return x, cache._replace(shared=(cache.shared, log))


def logged(policy: dj.policies.Policy) -> dj.policies.Policy:
    """The policy, which also tells what its layers did."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.init}
    return type("Logged", (_Logging, type(policy)), {})(**fields)


def log_of(state: State) -> Log:
    """What the layers did in the step before this state, of a run under a `logged` policy."""
    return state.cache.shared[1]


@functools.partial(jax.jit, static_argnames="variant")
def _step(model: dj.Model, inputs: Inputs, plan: Plan, variant: Variant, state: State) -> State:
    return step(Generation.of(model, inputs, plan), variant, state)


def states(model: dj.Model, prompt, **options) -> Iterator[State]:
    """The engine's states, at first and after every step; arguments as in `generate`, no guidance.

    A prompt with masks is a template, and the arguments are those of `infill`.
    """
    is_template = (np.asarray(prompt) == model.spec.mask_id).any()
    inputs, plan, *_ = (prepare_infill if is_template else prepare)(model, prompt, **options)
    state = begin_pieces(model, inputs, plan)
    yield state
    while bool(state.canvas.active.any()):
        variant = plan.variants[int(next_variant(plan, state))]
        state = _step(model, inputs, plan, variant, state)
        yield state


@jax.jit
def _recorded(state: State) -> Trace:
    return RecordedSteps(limit=0).output(state.record, state.canvas, state.canvas.tokens)


def trace_of(ran: list[State]) -> Trace:
    """The trace of all states of a run, which `states` was asked for, as `generate` returns it."""
    trace, shown = jax.tree.map(np.asarray, _recorded(ran[-1])), ran[-1].canvas.layout.shown
    steps = int(trace.steps)
    cut = {
        name: getattr(trace, name)[:steps, :, :shown] for name in ("computed", "read", "proposed", "score")
    }
    return trace._replace(tokens=trace.tokens[: steps + 1, :, :shown], active=trace.active[:steps], **cut)


@functools.partial(jax.jit, static_argnames="variant")
def _logits(model: dj.Model, inputs: Inputs, plan: Plan, variant: Variant, state: State):
    canvas = state.canvas
    rows = computed_rows(state.need, variant, canvas, plan.policy)
    hidden, cache = network(Generation.of(model, inputs, plan), canvas.tokens, canvas, rows, state.cache)
    return scatter(jnp.zeros((*canvas.tokens.shape, model.spec.vocab)), rows.index,
                   unembed(model.params, model.spec, hidden)), cache  # fmt: skip


def step_logits(model: dj.Model, prompt, state: State, **options) -> tuple[Float[Array, "b l v"], Any]:
    """Logits of the computed positions in the step after a state of `states`, 0 elsewhere; and the cache."""
    inputs, plan, *_ = prepare(model, prompt, **options)
    return _logits(model, inputs, plan, plan.variants[int(next_variant(plan, state))], state)
