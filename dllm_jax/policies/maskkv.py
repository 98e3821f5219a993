"""MaskKV: eviction of prompt pairs by the votes of masked positions (arXiv:2510.09309)."""

import dataclasses
from typing import Any

from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import require_blocks, require_full_attention
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import TracedPositiveInt
from dllm_jax.policies.base import Policy
from dllm_jax.policies.dllm_cache import DLLMCache, OutputStore
from dllm_jax.policies.evict_prompt import EvictPrompt
from dllm_jax.policies.parts.prompt_eviction import LayerStep, PromptEviction
from dllm_jax.policies.parts.rolling_eviction import rolling
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.traced import is_traced
from dllm_jax.xla.order import as_named_on_tpu


@dataclasses.dataclass(frozen=True)
class MaskKV(PromptEviction, DLLMCache):
    """Evicts the prompt KV pairs that masked tokens attend to least, on top of dLLM-Cache (MaskKV).

    Use it with long prompts of which the answer needs little, when the KV cache does not fit in memory. To
    evict under another policy, use `EvictPrompt`.

    A prompt refresh attends to the full prompt. After each layer's attention every KV head retains the
    positions with the most votes. Between refreshes no other KV pair of the prompt is cached.

    On block-causal models it is `EvictPrompt` over exact decoding with these votes and budgets and this
    `reselect`: nothing is refreshed, and with reselect=False the first step alone evicts. There reselect=True
    needs what it needs in `EvictPrompt`.

    Memory: The budget for the prompt, stored back to back over layers and heads, and dense keys, values and
    branch outputs of the response, the outputs also at the positions that predict it.

    Limits: By default the first selection is final, which fails when later tokens need other parts of the
    prompt; see `reselect`. On Dream `MaskVotes` misses the last prompt token.

    Equals exact decoding when: prompt_every=1, response_every=1; on block-causal models, budget >= prompt
      length and reselect=False. With budget >= prompt length it equals `DLLMCache` of the same intervals and
      ratio, except for the position before the response in the first layer (shifted output heads).
    Differences: Budgets are rounded so that all of the budget is used, where the paper's floors lose some.
      Online layer budgets are measured in a pass before the first step (`eviction.OnlineLayers`).

    Attributes:
      reselect: Whether every prompt refresh votes again, rather than renewing the KV pairs selected first.
        Needs prompt_every to be a multiple of response_every, so that all masks vote.
    """

    prompt_every: TracedPositiveInt = 50
    response_every: TracedPositiveInt = 5
    reselect: bool = False

    def __post_init__(self):
        super().__post_init__()
        known = not is_traced(self.prompt_every, self.response_every)
        if self.reselect and known and self.prompt_every % self.response_every:
            raise ValueError(
                f"reselect needs prompt_every={self.prompt_every} to be a multiple of "
                f"response_every={self.response_every}: only a response refresh has all masks vote"
            )

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K and V of the response, outputs also at what predicts it; in `shared`, the prompt's kept pairs."""
        require_full_attention(spec, type(self).__name__)
        outputs = OutputStore.zeros(spec, layout, batch, layout.response, dtype)
        pairs = self.empty_pairs(spec, layout, batch, dtype)
        return self.counting(Cache(outputs, pairs), spec, batch)

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        """`EvictPrompt` over exact decoding: nothing refreshes prompt or response there."""
        require_blocks(spec, type(self).__name__, "Use Policy()")
        if self.reselect:
            return rolling(self, spec)
        return EvictPrompt(self.budget, self.layers, self.heads, self.votes, policy=Policy(), reselect=False)

    @override
    def _evicted(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.prompt & ~cache.shared.positions(canvas.layout.length)

    @override
    def before_first_step(
        self,
        cache: Cache,
        canvas: Canvas,
        model: Model,
        x: Float[Array, "b l m"],
        interventions: tuple[Intervention, ...] = (),
    ) -> Cache:
        """Sets the layer budgets of each sequence (equations 9-13, or as `layers` says)."""
        pairs = self.with_budgets(cache.shared, canvas, model, x, interventions)
        return self.counted(cache._replace(shared=pairs), canvas)

    @override
    def due(
        self, canvas: Canvas, first: Bool[Array, ""] | bool
    ) -> tuple[Bool[Array, "b 1"], Bool[Array, "b 1"]]:
        """As `DLLMCache`, but the first layer refreshes the prompt no more often: its pairs are evicted."""
        return canvas.every_n_steps(self.prompt_every), canvas.every_n_steps(self.response_every) | first

    @override
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
        """Attention to the kept pairs, or, where the prompt is due, to all of it before the eviction."""
        # The response's own pairs are dense, and read like `DLLMCache`'s.
        layout = canvas.layout
        q, k = layer.qk(x, recomputed.positions)
        refresh = recomputed.in_place and not rows.full
        new = as_named_on_tpu(k, cache.kernels.rules) if refresh else k
        cache = cache.write(recomputed.last(layout.response), k=new)
        now = cache.read()

        # A step of the response's width alone holds no prompt, and in full steps it is due. Pairs are chosen
        # in the first step, with `reselect` at every prompt refresh.
        widest_response = layout.response_inputs(canvas.spec.shifted)
        holds_prompt = rows.index.shape[1] > widest_response or (rows.full and layout.prompt > 0)
        step = LayerStep(layer, q, (recomputed, k), (rows, value), canvas, cache.readable)
        dense = KV(now.k, now.v)
        if not holds_prompt:
            return self.attend_to_kept(step, cache.shared, dense), cache
        due = canvas.every_n_steps(self.prompt_every) & canvas.active[:, None]
        chooses, all_due = canvas.first_step | self.reselect, rows.full and widest_response < layout.length
        branch, pairs = self.attend_and_evict(step, cache.shared, dense, due, chooses, all_due)
        return branch, cache._replace(shared=pairs)
