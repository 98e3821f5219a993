"""Eviction of the prompt under another policy: what is recomputed and what is kept, as two values.

MaskKV's eviction (arXiv:2510.09309) rests on dLLM-Cache in the paper; nothing in it asks for that.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree
from typing_extensions import override

from dllm_jax.eviction.pair_store import PairStore
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.policies.fast_dllm import DualCache
from dllm_jax.policies.parts.prompt_eviction import PromptEviction
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows


class EvictedPrompt(NamedTuple):
    """What `EvictPrompt` shares between layers and steps.

    Attributes:
      pairs: the kept pairs of the prompt.
      policy: what the policy under it shares.
    """

    pairs: PairStore
    policy: PyTree


@dataclasses.dataclass(frozen=True)
class EvictPrompt(PromptEviction):
    """Another policy, which keeps only `budget` pairs of the prompt per layer and head between its refreshes.

    Wherever the policy recomputes all of the prompt, queries attend to all of it, and each layer's heads
    choose the pairs that they keep (`dllm_jax.eviction`). In other steps no prompt position is recomputed:
    what the policy selects of the prompt is left out, but for the position that predicts the first response
    token (shifted heads), whose pair is stored like the response's. Storage: [n b r k d] for the response,
    and the budget.

    Exact limit: budget >= prompt length is the policy without eviction; so is one that refreshes everything
    in every step, at any budget.

    Attributes:
      policy: which positions are recomputed, and when: any policy that differs from the exact decoder in what
        it selects, not in how its layers compute (`DualCache`, `PrefixCache`, `DKVDecode`, `DKVPD`,
        `DKVGreedy`, or one of your own). The others store or evict pairs in a way of their own, and are
        refused.
      budget: see `PromptEviction`, which has `layers`, `heads` and `votes` too.
      reselect: choose anew whenever the prompt is recomputed; False renews the pairs chosen in the first
        step.
    """

    policy: Policy = DualCache()
    reselect: bool = True

    def __post_init__(self):
        super().__post_init__()
        policy = self.policy
        if not policy.reuses:
            raise ValueError(f"policy={policy!r} recomputes the prompt in every step: nothing to evict")
        if type(policy).layer is not Policy.layer or policy.scored != "block":
            raise ValueError(
                f"policy={policy!r} computes or scores in a way of its own, and so decides itself what it "
                "stores of the prompt: EvictPrompt takes policies that only select, such as DualCache()"
            )

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K and V of the response and, with a shifted head, of the position before it; the kept pairs."""
        under = self.policy.init(spec, layout, batch, dtype)
        dense = KV.zeros(spec, batch, layout.response_inputs(spec.shifted), dtype)
        return Cache(dense, EvictedPrompt(self.empty_pairs(spec, layout, batch, dtype), under.shared))

    @override
    def before_first_step(
        self, cache: Cache, canvas: Canvas, model: Model, x: Float[Array, "b l m"]
    ) -> Cache:
        """The policy's own, and the layer budgets of each sequence."""
        cache = self._of_policy(cache, self.policy.before_first_step(_under(cache), canvas, model, x))
        pairs = self.with_budgets(cache.shared.pairs, canvas, model, x)
        return cache._replace(shared=cache.shared._replace(pairs=pairs))

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """What the policy selects; of the prompt all or nothing."""
        selected, evictable = self.policy.select(_under(cache), canvas), self._evictable(canvas)
        return jnp.where(
            _all_of(evictable & canvas.valid, selected), selected | evictable, selected & ~evictable
        )

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        return self._of_policy(cache, self.policy.before_layers(_under(cache), canvas, rows))

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """The exact layer over the kept pairs and the response, or over everything before the eviction."""
        q, k = layer.qk(x, rows.index)
        v, shared = layer.value(x), cache.shared
        slots = canvas.layout.response_inputs(canvas.spec.shifted)
        cache, dense = cache.update(rows.last(slots), KV(k, v))

        # The prompt is due where all of it is selected, which takes a step at least as wide.
        evictable, due = self._evictable(canvas), None
        if 0 < canvas.layout.length - slots <= rows.index.shape[1]:
            due = _all_of(evictable, rows.mask())
        o, pairs = self.attend_or_evict(
            layer, q, shared.pairs, dense, (rows, k), (rows, v), due,
            canvas.first_step | self.reselect, canvas,
        )  # fmt: skip
        return layer.finish(x, o), cache._replace(shared=shared._replace(pairs=pairs))

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        return self._of_policy(cache, self.policy.observe(_under(cache), canvas, rows, proposal))

    @override
    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return self.policy.eligible(canvas)

    @override
    def extra_positions(
        self, cache: Cache, canvas: Canvas, computed: Bool[Array, "b l"]
    ) -> Float[Array, "b n"]:
        """The policy's, and the pass that measures the importance of the layers, if there was one."""
        measured = super().extra_positions(cache, canvas, computed)
        return measured + self.policy.extra_positions(_under(cache), canvas, computed)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        return self.policy.widths(spec, layout)

    def _evictable(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions of the prompt, padding included, that are not stored densely: kept or evicted."""
        dense = canvas.layout.response_inputs(canvas.spec.shifted)
        return canvas.everything & (canvas.position < canvas.layout.length - dense)

    def _of_policy(self, cache: Cache, under: Cache) -> Cache:
        """The cache with what the policy under it has changed, which shares but does not store."""
        return cache._replace(shared=cache.shared._replace(policy=under.shared))


def _under(cache: Cache) -> Cache:
    """The cache as the policy sees it."""
    return cache._replace(shared=cache.shared.policy)


def _all_of(positions: Bool[Array, "b l"], chosen: Bool[Array, "b l"]) -> Bool[Array, "b 1"]:
    """Whether a sequence has all of these positions chosen, and has any."""
    every = jnp.all(chosen | ~positions, axis=1, keepdims=True)
    return every & jnp.any(positions, axis=1, keepdims=True)
