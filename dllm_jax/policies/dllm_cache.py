"""dLLM-Cache: long-interval prompt caching and value-guided partial updates (arXiv:2506.06295)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from dllm_jax.nn.arithmetic import cosine
from dllm_jax.nn.layer import Block
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, PositiveInt
from dllm_jax.policies.base import Policy
from dllm_jax.policies.parts.branches import Store, branches, write_keys
from dllm_jax.policies.parts.partial import lowest, put_tail, run_narrowest, take_tail
from dllm_jax.state.cache import KV, Cache, LayerView
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, gather, scatter


@dataclasses.dataclass(frozen=True)
class DLLMCache(Policy):
    """Refreshes the prompt every Kp steps, the response every Kr, and its most changed rows in between.

    All response rows pass through every layer at every step, but between refreshes a layer projects only
    their values and compares them with those of the previous step: the int(length * ratio) least similar
    rows get new keys, attention and MLP outputs, the others add their cached outputs to the residual
    stream. Values are renewed for all rows. Layer 0 refreshes the response at every step.

    Exact limit: prompt_every=1, response_every=1.
    Departures: prompt rows are not carried between refreshes, except the one that predicts the first
    response token (shifted heads), whose first layer is always recomputed, as in the reference; no other
    prompt output is ever read. Steps are counted per row, so rows of a batch may refresh at different times.

    Attributes:
      prompt_every: prompt refresh interval Kp, in steps of the whole generation.
      response_every: response refresh interval Kr.
      ratio: share of the response updated between refreshes; 0 updates nothing, values included.
    """

    prompt_every: PositiveInt = 100
    response_every: PositiveInt = 7
    ratio: Fraction = 0.25

    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Dense K and V, and both branch outputs of the response."""
        pairs = KV.zeros(spec, batch, layout.length, dtype)
        return Cache(Store(*pairs, *branches(spec, layout, batch, dtype)), shared=())

    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The response and the rows that predict it; everything when the prompt is due."""
        return canvas.answering | canvas.due(self.prompt_every)

    def widths(self, layout: Layout) -> tuple[int, ...]:
        """The response and the row before it; the canvas, for batches where only some prompts are due."""
        return (layout.answering, layout.length)

    def due(self, canvas: Canvas, first: Bool[Array, ""]) -> tuple[Bool[Array, "b 1"], Bool[Array, "b 1"]]:
        """Whether a layer refreshes the prompt and the response; `first` is true in the first layer."""
        return canvas.due(self.prompt_every) | first, canvas.due(self.response_every) | first

    def stale(
        self, block: Block, value: Float[Array, "b q k d"], kv: LayerView, rows: Rows, canvas: Canvas
    ) -> Bool[Array, "b q"]:
        """Rows whose keys and branch outputs this layer recomputes."""
        length = canvas.layout.length
        similarity = cosine(value, take_tail(kv.stack.v, kv.layer, rows.index, length))
        response = rows.take(canvas.response & canvas.valid) & (rows.index < length)
        prompt_due, response_due = self.due(canvas, block.layer == 0)
        changed = lowest(similarity, response, self.ratio)
        in_prompt = rows.index < canvas.layout.prompt
        return jnp.where(in_prompt, prompt_due, (response_due & (rows.index < length)) | changed)

    def layer(
        self,
        block: Block,
        x: Float[Array, "b q m"],
        kv: LayerView,
        shared: PyTree,
        rows: Rows,
        canvas: Canvas,
    ) -> tuple[Float[Array, "b q m"], LayerView, PyTree]:
        """New values, new keys and branch outputs of the stale rows, cached outputs of the others."""
        length, response, store = canvas.layout.length, canvas.layout.response, kv.stack
        value = block.value(x)
        stale = self.stale(block, value, kv, rows, canvas)
        renewed = stale | (rows.index >= canvas.layout.prompt) if self.ratio else stale
        v = put_tail(store.v, kv.layer, jnp.where(renewed, rows.index, length), length, value)
        attended, mlp = (take_tail(a, kv.layer, rows.index, length) for a in (store.attention, store.mlp))

        def refresh(index, some, carry):
            kv, shared, attended, mlp = carry
            o, kv, shared = self.attend(block, gather(x, index), value, kv, shared, rows, some, canvas)
            branch = block.out(o)
            after = block.mlp(gather(x, index) + branch)
            return kv, shared, scatter(attended, index, branch), scatter(mlp, index, after)

        few = x.shape[1] - response + int(response * self.ratio)
        kv, shared, attended, mlp = run_narrowest(
            stale,
            tuple(w for w in sorted({few, x.shape[1]}) if w > 0),
            rows,
            length,
            refresh,
            (kv._replace(stack=store._replace(v=v)), shared, attended, mlp),
        )
        at = jnp.where(stale, rows.index, length)
        store = kv.stack._replace(
            attention=put_tail(store.attention, kv.layer, at, length, attended),
            mlp=put_tail(store.mlp, kv.layer, at, length, mlp),
        )
        return x + attended + mlp, kv._replace(stack=store), shared

    def attend(
        self,
        block: Block,
        x: Float[Array, "b w m"],
        value: Float[Array, "b q k d"],
        kv: LayerView,
        shared: PyTree,
        rows: Rows,
        some: Rows,
        canvas: Canvas,
    ) -> tuple[Float[Array, "b w h d"], LayerView, PyTree]:
        """Keys of some of the rows overwrite the stored ones, then these rows attend to everything.

        Args:
          block: this layer's weights.
          x: the residual stream at `some`.
          value: fresh values of `rows`; those of the response are stored already.
          kv: this layer's storage.
          shared: `Cache.shared`.
          rows: all rows that pass through the layer.
          some: those to refresh.
          canvas: state before the step.
        """
        q, k = block.qk(x, some)
        kv = write_keys(kv, some, k, canvas)
        now = kv.read()
        return block.attention(q, now.k, now.v, canvas.attends(some))[0], kv, shared
