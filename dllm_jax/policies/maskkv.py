"""MaskKV: eviction of prompt pairs by the votes of masked positions (arXiv:2510.09309)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax import eviction
from dllm_jax.eviction.attending import attend_to_kept, prompt_pairs
from dllm_jax.eviction.pair_store import PairStore, empty
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, TracedPositiveInt
from dllm_jax.policies.dllm_cache import DLLMCache
from dllm_jax.policies.parts.branches import BranchStore
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.traced import is_traced


@dataclasses.dataclass(frozen=True)
class MaskKV(DLLMCache):
    """dLLM-Cache that keeps, after the first step, only the prompt pairs that masked positions look at.

    A prompt refresh attends to the full prompt. After each layer's attention, every kv head keeps the
    positions with most votes; between refreshes nothing else of the prompt is stored. The storage is exactly
    as large as the budget: one flat run of slots over layers and heads.

    Exact limit: prompt_every=1, response_every=1. With budget >= prompt length it is `DLLMCache`, except
    for the position before the response in the first layer (shifted heads).
    Departures: budgets are rounded so that all of it is used, where the paper's floors lose some; online
    layer budgets are measured in a pass of their own, see `eviction.OnlineLayers`.

    Attributes:
      budget: prompt pairs kept per layer and kv head, on average.
      layers: how the budget is spread over layers; `BoundaryMiddle` needs the profile of your model, without
        which it is uniform.
      heads: how a layer's budget is spread over its kv heads.
      votes: who votes; the baselines are values of these three fields (`dllm_jax.eviction`).
      reselect: vote again at every prompt refresh instead of renewing the pairs first chosen; needs
        prompt_every to be a multiple of response_every, so that all masks vote.
    """

    prompt_every: TracedPositiveInt = 50
    response_every: TracedPositiveInt = 5
    budget: PositiveInt = 256
    layers: eviction.LayerBudgets = eviction.BoundaryMiddle()
    heads: eviction.HeadBudgets = eviction.PromptPreference()
    votes: eviction.Voters = eviction.MaskVotes()
    reselect: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.layers.check()
        known = not is_traced(self.prompt_every, self.response_every)
        if self.reselect and known and self.prompt_every % self.response_every:
            raise ValueError(
                f"reselect needs prompt_every={self.prompt_every} to be a multiple of "
                f"response_every={self.response_every}: only a response refresh has all masks vote"
            )

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K, V and both branch outputs of the response; in `shared`, the kept pairs of the prompt."""
        pairs = empty(self.table(spec, layout), batch, spec.kv_heads, spec.head, dtype)
        return Cache(BranchStore.zeros(spec, layout, batch, layout.response, dtype), pairs)

    @override
    def before_first_step(
        self, cache: Cache, canvas: Canvas, model: Model, x: Float[Array, "b l m"]
    ) -> Cache:
        """Sets the layer budgets of each sequence (equations 9-13)."""
        # Looked up by prompt length, since padding leaves sequences with shorter prompts.
        table, length = self.table(canvas.spec, canvas.layout), jnp.sum(canvas.prompt, axis=1)
        budgets = jnp.asarray(table.T)[:, length if len(table) > 1 else jnp.zeros_like(length)]

        # The importance of the layers is measured only if the budgets ask for it.
        measure = lambda: eviction.importance(model, x, canvas.valid, canvas.valid)
        budgets = self.layers.of_request(budgets, measure, self.budget, length)
        return cache._replace(shared=cache.shared._replace(budget=budgets))

    @override
    def due(
        self, canvas: Canvas, first: Bool[Array, ""] | bool
    ) -> tuple[Bool[Array, "b 1"], Bool[Array, "b 1"]]:
        """As `DLLMCache`, but the first layer does not refresh the prompt either: its pairs are evicted."""
        return canvas.due(self.prompt_every), canvas.due(self.response_every) | first

    @override
    def attend(
        self,
        layer: Layer,
        x: Float[Array, "b w m"],
        value: Float[Array, "b q k d"],
        cache: LayerCache,
        rows: Rows,
        some: Rows,
        canvas: Canvas,
    ) -> tuple[Float[Array, "b w h d"], LayerCache]:
        """Attention to the kept pairs, or, where the prompt is due, to all of it before the eviction."""
        # The response's own pairs are dense, and read like `DLLMCache`'s.
        layout, pairs = canvas.layout, cache.shared
        q, k = layer.qk(x, some.index)
        cache = cache.write(some.last(layout.response), k=k)
        now = cache.read()
        real = canvas.valid[:, None, None, layout.prompt :]
        widest = self.widest_head(canvas.spec, layout)

        # Between refreshes (prompt-state exclusion): the response, then the kept pairs in chunks, merged by
        # their log-sum-exp.
        widest_response = layout.response_inputs(canvas.spec.shifted)
        holds_prompt = rows.index.shape[1] > widest_response or (rows.full and layout.prompt > 0)
        if not holds_prompt:
            of_response = layer.attention(q, now.k, now.v, real)
            return attend_to_kept(layer, q, pairs, of_response, self.budget, widest), cache

        # At a refresh (of some sequences at least): the full prompt where it is due, kept pairs elsewhere.
        due = canvas.due(self.prompt_every) & canvas.active[:, None]
        prompt_k, prompt_v, in_prompt = prompt_pairs(
            pairs, layer.index, due, (some, k), (rows, value), canvas
        )
        keys = jnp.concatenate([prompt_k, now.k], axis=1)
        in_response = jnp.broadcast_to(real, (*in_prompt.shape[:3], layout.response))
        mask = jnp.concatenate([in_prompt, in_response], axis=-1)
        o, lse = layer.attention(q, keys, jnp.concatenate([prompt_v, now.v], axis=1), mask)

        # Equations 7 and 14: votes of the masks and each head's preference choose what is kept; what was
        # chosen before is renewed.
        votes, preference = eviction.evidence(self.votes, layer, q, keys, lse, mask, some, canvas)
        pairs = self.evict(pairs, layer, votes, preference, due, canvas)
        pairs = pairs.renew(layer, prompt_k, prompt_v, widest, due)
        return o, cache._replace(shared=pairs)

    def evict(
        self,
        pairs: PairStore,
        layer: Layer,
        votes: Float[Array, "b k p"],
        preference: Float[Array, "b k"],
        due: Bool[Array, "b 1"],
        canvas: Canvas,
    ) -> PairStore:
        """Chooses a layer's pairs (equation 16): in the first step, with `reselect` at every prompt refresh.

        Args:
          pairs: the store, before the choice.
          layer: the layer, which chooses the best.
          votes: equation 7's, by kv head.
          preference: P_h of equation 14.
          due: sequences whose prompt is recomputed.
          canvas: state before the step.
        """
        # Layers lie one after the other in the store, each with the room of its budget.
        first_slot = (jnp.cumsum(pairs.budget, axis=0) - pairs.budget)[layer.index] * canvas.spec.kv_heads
        length = jnp.sum(canvas.prompt, axis=1)
        count = self.heads.budgets(votes, preference, pairs.budget[layer.index], length)
        position = layer.topk_evict(votes, count, self.widest_head(canvas.spec, canvas.layout))
        chooses = due if self.reselect else due & canvas.first_step
        return pairs.allot(layer.index, first_slot, position, canvas.layout.prompt, chooses)

    @override
    def extra_positions(
        self, cache: Cache, canvas: Canvas, computed: Bool[Array, "b l"]
    ) -> Float[Array, "b"]:
        """The pass that measures the importance of the layers before the first step, if there was one."""
        first = canvas.active & (canvas.step == 0) & self.layers.online
        return jnp.where(first, jnp.sum(canvas.valid, axis=1), 0.0)

    def widest_head(self, spec: ModelSpec, layout: Layout) -> int:
        """Upper bound of the pairs that a kv head keeps in any layer."""
        widest = self.layers.widest(self.table(spec, layout), self.budget, layout.prompt)
        return self.heads.widest(widest, spec.kv_heads, layout.prompt)

    def table(self, spec: ModelSpec, layout: Layout) -> Int[np.ndarray, "lengths n"]:
        """Pairs per kv head of each layer, as far as known before the run; see `eviction.table`."""
        return eviction.table(self.layers, spec.layers, self.budget, layout)
