"""dLLM-Cache: long-interval prompt caching and value-guided partial updates (arXiv:2506.06295)."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.arithmetic import cosine
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, TracedPositiveInt
from dllm_jax.policies.base import Phase, Policy, as_kind
from dllm_jax.policies.parts.partial import least_similar
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, compact_rows, full_rows
from dllm_jax.xla.dependencies import read_before_write


class OutputStore(NamedTuple):
    """The layers' storage, stacked.

    Attributes:
      k: rotated keys of the last s canvas positions (`DLLMCache`: of all of them).
      v: their values.
      attention: the attention branch's output at the last t positions: the response, and with a shifted
        head the position before it. Outputs elsewhere in the prompt are never read between refreshes.
      mlp: the MLP branch's output at the same positions.
      proxy: SPA-Cache's proxies of the last step there; None where there are none.
    """

    k: Float[Array, "n b s k d"]
    v: Float[Array, "n b s k d"]
    attention: Float[Array, "n b t m"]
    mlp: Float[Array, "n b t m"]
    proxy: Float[Array, "n b t r"] | None = None

    @staticmethod
    def zeros(spec: ModelSpec, layout: Layout, batch: int, slots: int, dtype: Any) -> "OutputStore":
        """Empty storage; K and V of the last `slots` positions."""
        output = jnp.zeros((spec.layers, batch, layout.response_inputs(spec.shifted), spec.width), dtype)
        return OutputStore(*KV.zeros(spec, batch, slots, dtype), output, output)


UPDATE, REFRESH = "update", "refresh"  # phases: some of the response is recomputed, or all of it may be


@dataclasses.dataclass(frozen=True)
class DLLMCache(Policy):
    """Refreshes prompt and response at intervals; in between, updates the response tokens that changed most.

    Use it when the response must stay fresh at every step, for example with short blocks or images.

    Between refreshes each layer computes the values of the whole response and compares them with those of the
    previous step. The least similar tokens, a fraction `ratio` rounded down, get new keys, attention and MLP
    outputs. The other tokens add their cached outputs to the residual stream. Layer 0 refreshes the response
    at every step.

    Memory: Dense keys and values, and both branch outputs at the response and the positions that predict it.

    Limits: Every step passes the whole response through every layer. On small models use `response_every` of
    4 or less, with `Threshold` of 2: 8, and 4 with `Threshold`, lost all accuracy on the chains of
    `tiny-llada`.

    Equals exact decoding when: prompt_every=1, response_every=1.
    Differences: Prompt outputs are not cached between refreshes, because nothing reads them, except for the
      position that predicts the first response token. Steps are counted per sequence, so the sequences of a
      batch may refresh at different times. Without a mask token (DiffusionGemma) a canvas takes the place of
      the response: the context is exact, so that `prompt_every` has no effect, and `response_every` counts
      from each canvas's first denoising step.

    Attributes:
      prompt_every: Prompt refresh interval Kp, in steps of the whole generation.
      response_every: Response refresh interval Kr, in steps of the whole generation.
      ratio: Fraction of the response updated between refreshes; 0 updates nothing in the layers after the
        first, not even values.
    """

    prompt_every: TracedPositiveInt = 100
    response_every: TracedPositiveInt = 7
    ratio: Fraction = 0.25

    renews_keys: ClassVar[bool] = False
    """Whether every step renews the keys of the whole response, as it does the values."""

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        return self if spec.has_mask_token else as_kind(self, InCanvas)

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Dense K and V, and both branch outputs at the response and the positions that predict it."""
        require_full_attention(spec, type(self).__name__, "refreshes prompt and response as a whole")
        return Cache(OutputStore.zeros(spec, layout, batch, layout.length, dtype), shared=())

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The response and the positions that predict it; everything when the prompt is due."""
        return canvas.response_inputs | canvas.every_n_steps(self.prompt_every)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response and, with a shifted head, the position before it."""
        return (layout.response_inputs(spec.shifted),)

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        """Updates, in which the first layer refreshes the response; refreshes, where the response is due."""
        due = lambda cache, canvas: self.due(canvas, False)[1][:, 0]
        update = Phase(UPDATE, of_layer=self.updating, at_end=True)
        return update, Phase(REFRESH, needed=due, at_end=True)

    def updating(self, layer: int | None, spec: ModelSpec) -> str:
        """The kind in which a layer runs in an update."""
        return REFRESH if layer == 0 else UPDATE

    def due(
        self, canvas: Canvas, first: Bool[Array, ""] | bool
    ) -> tuple[Bool[Array, "b 1"], Bool[Array, "b 1"]]:
        """Whether a layer refreshes the prompt, and the response; `first` is true in the first layer."""
        return canvas.every_n_steps(self.prompt_every) | first, canvas.every_n_steps(
            self.response_every
        ) | first

    def stale(
        self, layer: Layer, value: Float[Array, "b q k d"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> Bool[Array, "b q"]:
        """Computed positions whose keys and branch outputs this layer recomputes."""
        # V-verify: new values against those of the previous step, over the response.
        similarity = self.similarity(layer, value, cache, rows)
        response = rows.take(canvas.response & canvas.valid) & rows.real
        size = None if canvas.layout.padded else canvas.layout.response
        changed = self.most_changed(layer, similarity, response, size)

        # Where a refresh is due, all of prompt or response instead.
        prompt_due, response_due = self.due(canvas, layer.index == 0)
        in_prompt = rows.positions < canvas.layout.prompt
        return rows.real & jnp.where(in_prompt, prompt_due, response_due | changed)

    def similarity(
        self, layer: Layer, value: Float[Array, "b q k d"], cache: LayerCache, rows: Rows
    ) -> Float[Array, "b q"]:
        """How little the computed positions have changed since the last step."""
        stored = cache.read().v
        return cosine(value, rows.last(stored.shape[1]).take(stored))

    def most_changed(
        self, layer: Layer, similarity: Float[Array, "b q"], among: Bool[Array, "b q"], size: int | None
    ) -> Bool[Array, "b q"]:
        """Those of a set that this layer updates between refreshes; `size` is its own where it is known."""
        return least_similar(similarity, among, self.ratio, size=size)

    def part(self, layout: Layout) -> int:
        """Number of positions of which `ratio` is a fraction."""
        return layout.response

    def updated(self, phase: str, response: int) -> int | None:
        """Number of response positions that a layer updates in a phase; None if it may be any of them."""
        return int(response * self.ratio) if phase == UPDATE else None

    def renew(
        self,
        layer: Layer,
        x: Float[Array, "b q m"],
        value: Float[Array, "b q k d"],
        stale: Bool[Array, "b q"],
        cache: LayerCache,
        rows: Rows,
        canvas: Canvas,
    ) -> LayerCache:
        """New values, and keys (`renews_keys`), of the response, at its refreshes of the prompt too."""
        every_step = rows.positions >= canvas.layout.prompt
        renewed = stale | every_step if self.ratio or self.renews_keys else stale
        value = after_reading(stale, value, rows)
        slots = rows.last(cache.read().v.shape[1]).where(renewed)
        cache = cache.write(slots, v=value)
        return cache.write(slots, k=layer.qk(x, rows.positions)[1]) if self.renews_keys else cache

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """New values (`renew`), new keys and branch outputs of the stale positions, cached ones elsewhere."""
        tail = rows.last(cache.read().mlp.shape[1])

        # What changed is asked before this step's values take the place of the last one's.
        value = layer.value(x)
        stale = self.stale(layer, value, cache, rows, canvas)
        cache = self.renew(layer, x, value, stale, cache, rows, canvas)

        # Stale positions go through attention and MLP: in place where a refresh may be due, else gathered.
        stored, width = cache.read(), self.updated(rows.phase, self.part(canvas.layout))
        attended, mlp = tail.take(stored.attention), tail.take(stored.mlp)
        places = full_rows(stale) if width is None else compact_rows(stale, width)
        if places.index.size:
            recomputed = rows.where(stale) if width is None else rows.at(places)
            here, stream = layer.at(recomputed.index), places.take(x)
            attention_branch, cache = self.attend(here, stream, value, cache, rows, recomputed, canvas)
            mlp_branch = here.mlp(stream + attention_branch, stored=True)
            attended, mlp = places.put(attended, attention_branch), places.put(mlp, mlp_branch)

        # The residual stream is new everywhere; the other positions add their cached branch outputs to it.
        # In a partial step in place these are what is stored, and are read back: XLA for CPUs would read the
        # old ones once more otherwise, and copy the store for it.
        if rows.in_place and not rows.full:
            for name, new in (("attention", attended), ("mlp", mlp)):
                cache, now = cache.write_last(new[:, -stored.mlp.shape[1] :], name)
            if rows.index.shape[1] <= stored.mlp.shape[1]:
                attended, mlp = tail.take(now.attention), tail.take(now.mlp)
        elif not (rows.full and canvas.spec.full_steps_are_causal):  # no step reads a causal pass's outputs
            cache = cache.write(tail.where(stale), attention=attended, mlp=mlp)
        return layer.residual(x + attended + mlp), cache

    def attend(
        self,
        layer: Layer,
        x: Float[Array, "b w m"],
        value: Float[Array, "b q k d"],
        cache: LayerCache,
        rows: Rows,
        recomputed: Rows,
        canvas: Canvas,
    ) -> tuple[Float[Array, "b w m"], LayerCache]:
        """New keys of the stale positions overwrite stored ones, then their queries attend to everything.

        Args:
          layer: this layer's weights.
          x: the residual stream at `recomputed`.
          value: new values of `rows`; those of the response are stored already.
          cache: this layer's view of the storage.
          rows: all positions that pass through the layer.
          recomputed: the stale ones among them.
          canvas: state before the step.

        Returns:
          the attention branch at `recomputed`, and the changed cache.
        """
        q, k = layer.qk(x, recomputed.positions)
        if not self.renews_keys:
            cache = cache.write(recomputed.last(cache.read().k.shape[1]), k=k)
        now = cache.read()
        o, _ = layer.attention(q, now.k, now.v, cache.attends(recomputed, canvas))
        return layer.out(o), cache


@dataclasses.dataclass(frozen=True)
class InCanvas(DLLMCache):
    """dLLM-Cache in the canvas of a model without a mask token, whose context is stored causally.

    The first denoising step of a canvas computes all of it, and so does every `response_every`-th after it.
    """

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        return Cache(OutputStore.zeros(spec, layout, batch, layout.length, dtype), shared=())

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
        due = lambda cache, canvas: self.refreshes(canvas)[:, 0]
        return Phase(UPDATE, of_layer=self.updating), Phase(REFRESH, needed=due)

    def refreshes(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether the coming step computes everything: a causal pass, or a denoising one that is due."""
        in_canvas = dataclasses.replace(canvas, step=canvas.block_step - 1)
        return canvas.causal | self.due(in_canvas, False)[1]

    @override
    def part(self, layout: Layout) -> int:
        return layout.block

    @override
    def stale(
        self, layer: Layer, value: Float[Array, "b q k d"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> Bool[Array, "b q"]:
        similarity = self.similarity(layer, value, cache, rows)
        changed = self.most_changed(layer, similarity, rows.real & ~canvas.causal, None)
        return rows.real & (changed | self.refreshes(canvas) | (layer.index == 0))


def after_reading(
    stale: Bool[Array, "b q"], new: Float[Array, "b q *d"], rows: Rows
) -> Float[Array, "b q *d"]:
    """New values of rows, available only after the old ones were read, by which the stale rows were found.

    In a partial step in place all rows are written, so that nothing else makes the write wait for the read.
    """
    if rows.full or not rows.in_place:
        return new
    return read_before_write(stale.astype(jnp.float32), new)
