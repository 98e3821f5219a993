"""DyLLM: rows whose attention output has turned are salient, and alone computed again (arXiv:2603.08026)."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import TracedFraction, TracedPositiveInt
from dllm_jax.policies.base import Phase, Policy, as_kind
from dllm_jax.policies.parts.partial import run_narrowest
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.xla.dependencies import read_before_write
from dllm_jax.xla.order import same_in_all_loops

FIRST = 4  # steps at the beginning that pass the prompt, fixed in the released code


@dataclasses.dataclass(frozen=True)
class DyLLM(Policy):
    """Recomputes keys, values and MLP of tokens whose attention output changed; approximates the others.

    It is meant for responses that must stay fresh at every step where MLPs limit it: large batches on models
    without experts. On the CPU that was measured it was no faster than exact decoding.

    After the first steps, which compute everything, a step passes the response through all layers; the first
    four steps and every `prompt_every`-th one pass the prompt too. Queries are new everywhere. A layer renews
    keys and values of the salient rows, at first those that were just unmasked. Salient rows attend exactly;
    all others add what the new values change to their stored attention output. Rows whose output then has a
    cosine below `tau` with the stored one are salient for the MLP and for the next layer; the others add
    their stored MLP output.

    Memory: Dense keys and values, attention outputs in float32 and MLP outputs, for all positions.

    Limits: Queries, scores and projections run for the whole response. No step computes everything again
      after the first steps. Steps with the prompt, and at small batch all of them, run the other rows too and
      take what is stored in place of their results, as a step waits for weights.

    Equals exact decoding when: full_steps is at least the number of steps. tau=1 is not exact.
    Differences: On Dream the position before the response is computed while it predicts a mask; the reference
      lets the first token's own output predict it. Steps are counted per sequence. Without a mask token
      (DiffusionGemma) a canvas takes the place of the response. Its steps are counted from its first one, all
      of its rows are salient in the first layer, and `prompt_every` has no effect.

    Attributes:
      tau: Cosine below which a row is salient, in [0, 1]. The README has 0.99 and 0.995 for LLaDA, 0.995 and
        0.9975 for Dream.
      full_steps: Number of steps at the beginning that compute everything; 16 is the released code's
        default, 8 that of its evaluation, 4 that of its scripts.
      prompt_every: Steps between those that pass the prompt through the layers, after the first four, which
        do so whatever the interval; 4 in the released code.
    """

    tau: TracedFraction = 0.99
    full_steps: TracedPositiveInt = 16
    prompt_every: TracedPositiveInt = 4

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        return self if spec.has_mask_token else as_kind(self, InCanvas)

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        require_full_attention(spec, type(self).__name__, "corrects rows by what any of them changes")
        shared = jnp.zeros((batch, layout.length), bool)
        return Cache(SalienceStore.zeros(spec, layout, batch, dtype), shared)

    def _full(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether every row of the coming step is salient."""
        return (canvas.step < self.full_steps)[:, None]

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The response and what predicts its masks; the prompt too in the first and every few steps."""
        number = canvas.step + 1
        prompt = (number <= FIRST) | (jnp.fmod(number, self.prompt_every) == 0)
        rows = canvas.response | canvas.predicting_positions(canvas.response & canvas.masked)
        return rows | prompt[:, None] | self._full(canvas)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response and, with a shifted head, the position before it."""
        return (layout.response_inputs(spec.shifted),)

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        return Phase(NARROW, at_end=True), Phase(EVERY, at_end=True)

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """The first layer's salient rows: those that were just unmasked, or all."""
        return cache._replace(shared=(canvas.just_decoded | self._full(canvas)) & canvas.valid)

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        old, full, salient_rows = cache.read(), self._full(canvas), rows.take(cache.shared) & rows.real
        run = lambda marked, body, carry: run_narrowest(
            marked, widths(rows), rows, body, carry, skips=rows.phase == NARROW
        )

        # Keys and values of the salient rows, and what the new values change; of all other rows nothing.
        def renew(trip, where, here, pairs):
            of_trip, part = layer.in_trip(trip).at(here.index), where.take(x)
            k, v = of_trip.qk(part, here.positions)[1], of_trip.value(part)
            return where.put(pairs[0], k), where.put(pairs[1], v)

        before = rows.take(old.v)
        k, v = run(salient_rows, renew, (rows.take(old.k), before))
        change = rows.spread(v - before)
        cache = stored(cache, rows, k=k, v=v)
        now, mask = cache.read(), cache.attends(rows, canvas)
        q = layer.qk(x, rows.positions)[0]

        # Exact attention of the salient rows; the others' is corrected, with new queries and keys.
        last = rows.take(old.attention)
        corrected = last + layer.attention(q, now.k, change, mask)[0]

        def attend(trip, where, here, o):
            exact = layer.attention(where.take(q), now.k, now.v, cache.attends(here, canvas))[0]
            return where.put(o, exact)

        o = jnp.where(rows.real[..., None, None], run(salient_rows, attend, corrected), last)
        turned = salient(o, last, self.tau, full) & rows.real
        x = x + layer.out(o.astype(x.dtype))

        # MLP of the rows that turned: the next layer's salient ones.
        def renew_mlp(trip, where, here, branch):
            of_trip = layer.in_trip(trip).at(here.index)
            return where.put(branch, of_trip.mlp(where.take(x), stored=True))

        branch = run(turned, renew_mlp, rows.take(old.mlp))
        o = read_before_write(turned.astype(jnp.float32), o)  # what turned is found by what was stored
        if not (rows.full and canvas.spec.full_steps_are_causal):  # no step reads a causal pass's outputs
            cache = stored(cache, rows, attention=o, mlp=branch)
        shared = rows.where(turned).mask() & canvas.valid
        return layer.residual(x + branch), cache._replace(shared=shared)


@dataclasses.dataclass(frozen=True)
class InCanvas(DyLLM):
    """DyLLM in the canvas of a model without a mask token, whose context is stored causally."""

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        shared = jnp.zeros((batch, layout.length), bool)
        return Cache(SalienceStore.zeros(spec, layout, batch, dtype), shared)

    @override
    def _full(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        return canvas.causal | (canvas.block_step <= self.full_steps)[:, None]

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The canvas, of which every position passes through every layer."""
        return canvas.everything

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        return ()  # a canvas, which the engine adds

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        return Phase(NARROW), Phase(EVERY)

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """The first layer's salient rows: all, as each reads other expected embeddings in every step."""
        return cache._replace(shared=canvas.valid)


# -- storage of DyLLM's layers ---------------------------------------------------------------------


NARROW, EVERY = "narrow", "every"  # phases: salient rows are gathered where they are few, or run in place


class SalienceStore(NamedTuple):
    """The layers' storage for all positions, stacked.

    Attributes:
      k: Rotated keys.
      v: Values.
      attention: Attention outputs of all heads, before the output projection; float32, as they are summed up.
      mlp: Outputs of the MLP branch.
    """

    k: Float[Array, "n b l k d"]
    v: Float[Array, "n b l k d"]
    attention: Float[Array, "n b l h d"]
    mlp: Float[Array, "n b l m"]

    @staticmethod
    def zeros(spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> "SalienceStore":
        """Empty storage."""
        places = spec.layers, batch, layout.length
        attention = jnp.zeros((*places, spec.heads, spec.head_dim), jnp.float32)
        pairs = KV.zeros(spec, batch, layout.length, dtype, scattered=False)
        attention = same_in_all_loops(attention, scattered=False)
        return SalienceStore(*pairs, attention, jnp.zeros((*places, spec.width), dtype))


def widths(rows: Rows) -> tuple[int, ...]:
    """Returns the widths that salient rows run in: a quarter of the step's too, where that saves time."""
    every = rows.index.shape[1]
    return (every // 4, every) if rows.phase == NARROW and every >= 4 else (every,)


def stored(cache: LayerCache, rows: Rows, **parts: Float[Array, "b q *d"]) -> LayerCache:
    """Returns the cache with what a step's rows store: in place, the last ones of the canvas, or gathered.

    Of rows that change nothing it is what was stored. So no single slots are written, and arrays lie in one
    order in the loops of full and of partial steps (`dllm_jax.xla.order.same_in_all_loops`).
    """
    if not rows.in_place:
        return cache.write(rows, ahead=0, **parts)
    for name, new in parts.items():
        cache, _ = cache.write_last(new, name)
    return cache


def salient(
    new: Float[Array, "b q h d"], old: Float[Array, "b q h d"], tau: Any, whole: Bool[Array, "b 1"]
) -> Bool[Array, "b q"]:
    """Returns the rows whose attention output has turned by more than tau; in whole steps all."""
    flat = lambda a: a.reshape(*a.shape[:2], -1)
    new, old = flat(new), flat(old)
    norms = jnp.maximum(jnp.sum(new * new, -1), 1e-8) * jnp.maximum(jnp.sum(old * old, -1), 1e-8)
    return (jnp.sum(new * old, axis=-1) / jnp.sqrt(norms) < tau) | whole
