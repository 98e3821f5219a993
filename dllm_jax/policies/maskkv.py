"""MaskKV: eviction of prompt pairs by the votes of masked positions (arXiv:2510.09309)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax import eviction
from dllm_jax.eviction.attending import attend_to_kept, prompt_pairs
from dllm_jax.eviction.kept import Kept, empty
from dllm_jax.nn.layer import Block
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt
from dllm_jax.policies.dllm_cache import DLLMCache
from dllm_jax.policies.parts.branches import Store, branches, write_keys
from dllm_jax.state.cache import KV, Cache, LayerView
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows


@dataclasses.dataclass(frozen=True)
class MaskKV(DLLMCache):
    """dLLM-Cache that keeps, after the first step, only the prompt pairs that masked positions look at.

    A prompt refresh attends to the whole prompt. After each layer's attention, every kv head keeps the
    positions with most votes; between refreshes nothing else of the prompt is stored. The storage is exactly
    as large as the budget: one flat run of slots over layers and heads.

    Exact limit: prompt_every=1, response_every=1. With budget >= prompt length it is `DLLMCache`, except
    for the row before the response in the first layer (shifted heads).
    Departures: shares are rounded so that the budget is used up (`exact`), where the paper's floors lose some
    of it; online layer budgets are measured in a pass of their own, see `eviction.OnlineLayers`.

    Attributes:
      budget: prompt pairs kept per layer and kv head, on average.
      layers: how the budget is spread over layers; `BoundaryMiddle` needs the profile of your model, without
        which it is uniform.
      heads: how a layer's share is spread over its kv heads.
      votes: who votes; the baselines are values of these three fields (`dllm_jax.eviction`).
      exact: use the whole budget; False rounds down as printed.
      reselect: vote again at every prompt refresh instead of renewing the pairs first chosen; needs
        prompt_every to be a multiple of response_every, so that all masked rows vote.
    """

    prompt_every: PositiveInt = 50
    response_every: PositiveInt = 5
    budget: PositiveInt = 256
    layers: eviction.LayerBudgets = eviction.BoundaryMiddle()
    heads: eviction.HeadBudgets = eviction.PromptPreference()
    votes: eviction.Voters = eviction.MaskVotes()
    exact: bool = True
    reselect: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.layers.check()
        if self.reselect and self.prompt_every % self.response_every:
            raise ValueError(
                f"reselect needs prompt_every={self.prompt_every} to be a multiple of "
                f"response_every={self.response_every}: only a response refresh has all masked rows"
            )

    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K, V and both branch outputs of the response; in `shared`, the kept pairs of the prompt."""
        pairs = KV.zeros(spec, batch, layout.response, dtype)
        kept = empty(self.table(spec, layout), batch, spec.kv_heads, spec.head, dtype)
        return Cache(Store(*pairs, *branches(spec, layout, batch, dtype)), kept)

    def survey(self, cache: Cache, canvas: Canvas, model: Model, tokens: Int[Array, "b l"]) -> Cache:
        """Sets the layer budgets of each row."""
        table, length = self.table(canvas.spec, canvas.layout), jnp.sum(canvas.prompt, axis=1)
        budgets = jnp.asarray(table.T)[:, length if len(table) > 1 else jnp.zeros_like(length)]
        measure = lambda: eviction.importance(model, tokens, canvas.valid, canvas.valid)
        budgets = self.layers.of_request(budgets, measure, self.budget, length, self.exact)
        return cache._replace(shared=cache.shared._replace(budget=budgets))

    def due(self, canvas: Canvas, first: Bool[Array, ""]) -> tuple[Bool[Array, "b 1"], Bool[Array, "b 1"]]:
        """As `DLLMCache`, but the first layer does not refresh the prompt either: its pairs are evicted."""
        return canvas.due(self.prompt_every), canvas.due(self.response_every) | first

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
        """Attention to the kept pairs, or, where the prompt is due, to all of it before the eviction."""
        layout, layer = canvas.layout, block.layer
        q, k = block.qk(x, some)
        kv = write_keys(kv, some, k, canvas)
        now = kv.read()
        seen = canvas.valid[:, None, None, layout.prompt :]
        widest = self.widest_head(canvas.spec, layout)
        if rows.index.shape[1] <= self.widths(layout)[0]:
            given = block.attention(q, now.k, now.v, seen)
            o = attend_to_kept(block, q, shared, given, self.budget, widest)
            return o, kv, shared
        due = canvas.due(self.prompt_every) & canvas.active[:, None]
        prompt_k, prompt_v, real = prompt_pairs(shared, layer, due, (some, k), (rows, value), canvas)
        keys = jnp.concatenate([prompt_k, now.k], axis=1)
        mask = jnp.concatenate([real, jnp.broadcast_to(seen, (*real.shape[:3], layout.response))], axis=-1)
        o, lse = block.attention(q, keys, jnp.concatenate([prompt_v, now.v], axis=1), mask)
        votes, preference = eviction.evidence(self.votes, block, q, keys, lse, mask, some, canvas)
        shared = self.evict(shared, layer, votes, preference, due, canvas)
        shared = shared.renew(layer, prompt_k, prompt_v, widest, due)
        return o, kv, shared

    def evict(
        self,
        kept: Kept,
        layer: Int[Array, ""],
        votes: Float[Array, "b k p"],
        preference: Float[Array, "b k"],
        due: Bool[Array, "b 1"],
        canvas: Canvas,
    ) -> Kept:
        """Chooses a layer's pairs: at a row's first step, or whenever its prompt is due with `reselect`."""
        before = (jnp.cumsum(kept.budget, axis=0) - kept.budget)[layer] * canvas.spec.kv_heads
        length = jnp.sum(canvas.prompt, axis=1)
        keep = self.heads.keep(votes, preference, kept.budget[layer], length, self.exact)
        chooses = due if self.reselect else due & canvas.first_step
        return kept.allot(layer, before, keep, chooses)

    def widened(self, cache: Cache, canvas: Canvas, computed: Bool[Array, "b l"]) -> Float[Array, "b"]:
        """The pass of `survey` before the first step, if there was one."""
        first = canvas.active & (canvas.step == 0) & self.layers.online
        return jnp.where(first, jnp.sum(canvas.valid, axis=1), 0.0)

    def widest_head(self, spec: ModelSpec, layout: Layout) -> int:
        """The most pairs a head may keep."""
        widest = self.layers.widest(self.table(spec, layout), self.budget, layout.prompt)
        return self.heads.most(widest, spec.kv_heads, layout.prompt)

    def table(self, spec: ModelSpec, layout: Layout) -> Int[np.ndarray, "lengths n"]:
        """Pairs per kv head of each layer, as far as known before the run; see `eviction.table`."""
        return eviction.table(self.layers, spec.layers, self.budget, layout, self.exact)
