"""Eviction of the prompt under another policy: what is recomputed and what is kept, as two values.

MaskKV's eviction (arXiv:2510.09309) rests on dLLM-Cache in the paper; nothing in it asks for that. These
combinations are ours, no paper has them.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree
from typing_extensions import override

from dllm_jax import eviction
from dllm_jax.eviction.pair_store import PairStore
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.policies.d2cache import D2Cache
from dllm_jax.policies.elastic import ElasticCache
from dllm_jax.policies.fast_dllm import DualCache
from dllm_jax.policies.parts.expanded import layer_over_kept
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

    Wherever a layer recomputes all of the prompt, queries attend to all of it, and the layer's heads choose
    the pairs that they keep (`dllm_jax.eviction`). Elsewhere queries attend to these and to the response.
    Stored are the budget and [n b r k d] for the response and, with a shifted head, the position before it.

    Under a policy that only selects positions, no prompt position is recomputed but all of them together;
    what the policy selects of the prompt besides is left out. Under two policies with a layer of their own,
    single positions of the prompt are recomputed as these policies ask for it, which renews the pairs that
    are kept of them; a layer's pairs are laid out in canvas order while it runs (`parts.expanded`).

    - `D2Cache`: a position of which no head of any layer keeps a pair is for d2Cache what padding is: it is
      never selected, and its influence counts nowhere. Attention to evicted pairs is 0 in the rollout.
      Nothing is refreshed after the first step, so pairs are chosen once.
    - `ElasticCache`: a layer that has drifted recomputes the prompt too, from the inputs that it has stored,
      and chooses anew; the first layer, which never drifts, keeps its first choice. The test compares
      attention to kept pairs. The inputs of all positions are still stored.

    Exact limit: budget >= prompt length is the policy without eviction; so is `DKVDecode(refresh_every=1)`
    or another that only selects, and everything in every step, at any budget.

    Attributes:
      policy: which positions are recomputed, and when: `D2Cache`, `ElasticCache`, or any policy that differs
        from the exact decoder in what it selects, not in how its layers compute (`DualCache`, `PrefixCache`,
        `DKVDecode`, `DKVPD`, `DKVGreedy`, or one of your own). The others decide themselves which pairs
        of the prompt they store, and are refused; dLLM-Cache with this eviction is `MaskKV`.
      budget: see `PromptEviction`, which has `layers` and `heads` too.
      votes: see `PromptEviction`; by default those who predict, which are the masks but with a shifted head.
      reselect: choose anew whenever a layer recomputes the prompt and the voters are at hand: all of those
        that are not masked; False renews the pairs chosen in the first step.
    """

    votes: eviction.Voters = eviction.PredictingVotes()
    policy: Policy = DualCache()
    reselect: bool = True

    def __post_init__(self):
        super().__post_init__()
        policy = self.policy
        if not policy.reuses:
            raise ValueError(f"policy={policy!r} recomputes the prompt in every step: nothing to evict")
        if type(policy).layer not in (Policy.layer, D2Cache.layer, ElasticCache.layer):
            raise ValueError(
                f"policy={policy!r} has a layer of its own, which decides what is stored of the prompt: "
                "EvictPrompt takes D2Cache, ElasticCache and policies that only select, such as DualCache()"
            )

    @property
    def only_selects(self) -> bool:
        """Whether the policy leaves the layers to this one."""
        return type(self.policy).layer is Policy.layer

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K and V of the response and, with a shifted head, of the position before it; the kept pairs."""
        under = self.policy.init(spec, layout, batch, dtype)
        dense = KV.zeros(spec, batch, layout.response_inputs(spec.shifted), dtype)
        stored = under.layers._replace(**dense._asdict())
        return Cache(stored, EvictedPrompt(self.empty_pairs(spec, layout, batch, dtype), under.shared))

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
        """What the policy selects; where it only selects, of the prompt all or nothing."""
        evictable = self._evictable(canvas)
        if not self.only_selects:
            kept = cache.shared.pairs.kept(canvas.layout.length) | ~evictable | canvas.first_step
            return self.policy.select(_under(cache), dataclasses.replace(canvas, valid=canvas.valid & kept))
        selected = self.policy.select(_under(cache), canvas)
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
        """The policy's layer over the kept pairs and the response, or over everything before the eviction."""
        if not self.only_selects:
            own = cache._replace(shared=cache.shared.policy)
            chooses = canvas.first_step | self.reselect
            x, own, pairs = layer_over_kept(
                self, self.policy, cache.shared.pairs, layer, x, own, rows, chooses, canvas
            )
            return x, own._replace(shared=EvictedPrompt(pairs, own.shared))
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

    @property
    @override
    def scored(self) -> Literal["block", "response"]:
        return self.policy.scored

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
