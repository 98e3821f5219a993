"""A run step by step: the state after every step, and what a policy's layers did in it."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

import dllm_jax as dj
from dllm_jax.decoding.generation import Generation
from dllm_jax.decoding.loop import begin, coming
from dllm_jax.decoding.plan import Inputs, Plan
from dllm_jax.decoding.request import prepare
from dllm_jax.decoding.step import State, step
from dllm_jax.nn.arithmetic import cosine
from dllm_jax.state.rows import scatter


class Log(NamedTuple):
    """What the layers of one step did.

    Attributes:
      fed: positions that passed through the network.
      stale: positions whose keys and branch outputs were recomputed.
      similarity: new and stored values compared, where fed.
      hidden: the residual stream of the positions as they leave the last layer.
    """

    fed: Bool[Array, "b l"]
    stale: Bool[Array, "n b l"]
    similarity: Float[Array, "n b l"]
    hidden: Float[Array, "b l m"]


class Logging:
    """Mixin for policies built on `DLLMCache`: `Cache.shared` becomes (the policy's own, the log)."""

    def init(self, spec, layout, batch: int, dtype: Any):
        cache = super().init(spec, layout, batch, dtype)
        places = (spec.layers, batch, layout.length)
        log = Log(
            jnp.zeros(places[1:], bool),
            jnp.zeros(places, bool),
            jnp.zeros(places),
            jnp.zeros((*places[1:], spec.width), dtype),
        )
        return cache._replace(shared=(cache.shared, log))

    def before_first_step(self, cache, canvas, model, x):
        own, log = cache.shared
        cache = super().before_first_step(cache._replace(shared=own), canvas, model, x)
        return cache._replace(shared=(cache.shared, log))

    def layer(self, layer, x, cache, rows, canvas):
        own, log = cache.shared
        cache = cache._replace(shared=own)
        value, stored = layer.value(x), cache.read().v
        place = lambda a: scatter(jnp.zeros((a.shape[0], rows.length), a.dtype), rows.index, a)
        stale = place(self.stale(layer, value, cache, rows, canvas))
        similarity = place(cosine(value, rows.last(stored.shape[1]).take(stored)))
        x, cache = super().layer(layer, x, cache, rows, canvas)
        log = Log(
            rows.mask(),
            log.stale.at[layer.index].set(stale),
            log.similarity.at[layer.index].set(similarity),
            scatter(log.hidden, rows.index, x),
        )
        return x, cache._replace(shared=(cache.shared, log))


@functools.partial(jax.jit, static_argnames="width")
def _step(model: dj.Model, inputs: Inputs, plan: Plan, width: int | None, state: State) -> State:
    return step(Generation.of(model, inputs, plan), width, state)


def states(model: dj.Model, prompt, **options) -> Iterator[State]:
    """The engine's states, at first and after every step; arguments as in `generate`, no guidance."""
    inputs, plan, *_ = prepare(model, prompt, **options)
    state = begin(model, inputs, plan)
    yield state
    while bool(state.canvas.active.any()):
        variant = int(coming(plan, state))
        width = None if variant == len(plan.widths) else plan.widths[variant]
        state = _step(model, inputs, plan, width, state)
        yield state
