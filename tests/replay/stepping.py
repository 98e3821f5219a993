"""A run step by step: the state after every step, and what a policy's layers did in it."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import dllm_jax as dj
from dllm_jax.arithmetic import rope_table
from dllm_jax.blocks import advance
from dllm_jax.canvas import begin
from dllm_jax.partial import cosine, take_tail
from dllm_jax.record import Record
from dllm_jax.rows import scatter
from dllm_jax.step import Plan, State, needed, step


class Log(NamedTuple):
    """What the layers of one step did.

    Attributes:
      fed: rows that passed through the network.
      stale: rows whose keys and branch outputs were recomputed.
      similarity: new and stored values compared, where fed.
      hidden: the rows as they leave the last layer.
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

    def survey(self, cache, canvas, model, tokens):
        own, log = cache.shared
        cache = super().survey(cache._replace(shared=own), canvas, model, tokens)
        return cache._replace(shared=(cache.shared, log))

    def layer(self, block, x, kv, shared, rows, canvas):
        own, log = shared
        length = canvas.layout.length
        value = block.value(x)
        place = lambda a: scatter(jnp.zeros((a.shape[0], length), a.dtype), rows.index, a)
        stale = place(self.stale(block, value, kv, rows, canvas))
        similarity = place(cosine(value, take_tail(kv.stack.v, kv.layer, rows.index, length)))
        x, kv, own = super().layer(block, x, kv, own, rows, canvas)
        log = Log(
            rows.mask(length),
            log.stale.at[kv.layer].set(stale),
            log.similarity.at[kv.layer].set(similarity),
            scatter(log.hidden, rows.index, x),
        )
        return x, kv, (own, log)


@functools.partial(jax.jit, static_argnames=("plan", "width"))
def _step(model: dj.Model, plan: Plan, width: int | None, state: State) -> State:
    canvas = state.canvas
    rope = rope_table(canvas.layout.length, canvas.spec.head, canvas.spec.rope_base)
    return step(model, rope, None, plan, width, state)


def states(model: dj.Model, prompt, valid, layout: dj.Layout, policy, sampler) -> Iterator[State]:
    """The state after every step of a greedy run; `valid` is the prompt mask or None."""
    batch, width = prompt.shape
    plan = Plan(policy, sampler, tuple(sorted(set(policy.widths(layout)))), False, True)
    masks = np.full((batch, layout.response), model.spec.mask_id)
    real = np.ones((batch, layout.length), bool)
    if valid is not None:
        real[:, :width] = valid
    tokens = jnp.asarray(np.concatenate([prompt, masks], axis=1), jnp.int32)
    canvas = advance(begin(tokens, jnp.asarray(real), model.spec, layout), sampler, False)
    cache = policy.survey(policy.init(model.spec, layout, batch, model.dtype), canvas, model, tokens)
    record = Record.begin(canvas, sampler.max_steps(layout))
    state = State(canvas, cache, needed(plan, cache, canvas, None), record)
    while bool(state.canvas.active.any()):
        rows = int(state.need.sum(1).max())
        whole = bool((state.need | ~state.canvas.active[:, None]).all())
        fits = None if whole else min(w for w in plan.widths if w >= rows)
        state = _step(model, plan, fits, state)
        yield state
