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
from dllm_jax.eviction.store import PairStore
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import require_blocks
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy, begun
from dllm_jax.policies.fast_dllm import DualCache
from dllm_jax.policies.parts.prompt_eviction import LayerStep, PromptEviction
from dllm_jax.policies.parts.rolling_eviction import calls_in_blocks, rolling
from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows


class EvictedPrompt(NamedTuple):
    """State that `EvictPrompt` shares between layers and steps.

    Attributes:
      pairs: the kept pairs of the prompt.
      policy: Shared state of the policy under it.
    """

    pairs: PairStore
    policy: PyTree


@dataclasses.dataclass(frozen=True)
class EvictPrompt(PromptEviction):
    """Evicts prompt KV pairs under another policy, down to `budget` per layer and head on average.

    Use it when the prompt's KV pairs do not fit in memory and the other policy's partial steps suffice.

    When a step recomputes all of the prompt, queries attend to all of it and each head selects the KV pairs
    to retain (`dllm_jax.eviction`). Other steps recompute no prompt token, unless with a shifted output head
    the last one; queries attend to the retained KV pairs and the response. `Policy.reads` still applies.

    On block-causal models with reselect=False the first step evicts for good: it reads everything, and
    `votes` takes positions of its block (`SnapKV` and `PromptVotes`: of the prompt). Finished blocks stay
    dense, and what a prompt has beyond whole blocks is not evicted. With reselect=True the budget bounds all
    earlier blocks: the votes of each new block rank the retained KV pairs and those of the block before. That
    needs `EvenHeads()`, `UniformLayers()`, voters of the block, and a head that is not shifted. `policy`
    selects positions of the block: use `Policy()`.

    Memory: The budget, and [n b r k d] for keys and for values of the response (with a shifted output head,
    also of the position before it; on block-causal models, of up to a block less one before it). With
    reselect=True on block-causal models, the budget and a block.

    Limits: Needs a policy that consists of sets (`Policy.only_sets`). Accuracy falls when one selection must
    serve a long block.

    Equals exact decoding when: the policy recomputes everything in every step, for example
      `DKVDecode(refresh_every=1)`; not on block-causal models. With budget >= prompt length it equals the
      policy without eviction, if that recomputes the prompt as a whole. With reselect=True on block-causal
      models the budget must hold the response too.
    Differences: The combination is ours; MaskKV's paper evicts under dLLM-Cache only (`MaskKV`).

    Attributes:
      policy: Policy that selects the tokens to recompute, such as `DualCache`, `DKVDecode` or your own; on
        block-causal models also `Policy` and `DelayedCache`, with reselect=True `Policy` alone. Policies with
        layers of their own raise `ValueError`.
      votes: Positions whose attention scores the KV pairs. Default: the predicting positions (the masked
        tokens, unless the head is shifted).
      reselect: Whether KV pairs are selected again whenever the prompt is recomputed. False renews the KV
        pairs of the first step.
    """

    votes: eviction.Voters = eviction.PredictingVotes()
    policy: Policy = DualCache()
    reselect: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not self.policy.only_sets:
            raise ValueError(
                f"policy={self.policy!r} is not supported by EvictPrompt: it has its own layer, which "
                "decides what to cache of the prompt. Use a policy of sets: DualCache(), or on block-causal "
                "models Policy() with reselect=False."
            )

    # -- what is stored -----------------------------------------------------------------------------

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K and V of the response and, with a shifted head, of the position before it; the kept pairs."""
        self._check_model(spec)
        # What the policy shares between layers is kept; its storage, which holds all of the prompt, is not.
        under = self.policy.init(spec, layout, batch, dtype)
        dense = KV.zeros(spec, batch, self.dense_positions(spec, layout), dtype)
        shared = EvictedPrompt(self.empty_pairs(spec, layout, batch, dtype), under.shared)
        return self.counting(Cache(dense, shared, under.extra_positions), spec, batch)

    def _check_model(self, spec: ModelSpec):
        """Raises ValueError for options that evict nothing on this kind of model."""
        if not self.policy.stores(spec):
            raise ValueError(
                f"policy={self.policy!r} is not supported by EvictPrompt on {spec.family}: it recomputes the "
                "prompt in every step, and nothing can be evicted. Use DualCache()."
            )

    def dense_positions(self, spec: ModelSpec, layout: Layout) -> int:
        """Positions that are stored densely, the last ones: the response and inputs next to it."""
        if not spec.context.has_blocks:
            return layout.response_inputs(spec.shifted)
        # A prompt's end may begin the first block that is decoded.
        return min(layout.response + spec.context.shared, layout.length)

    @override
    def before_first_step(
        self,
        cache: Cache,
        canvas: Canvas,
        model: Model,
        x: Float[Array, "b l m"],
        interventions: tuple[Intervention, ...] = (),
    ) -> Cache:
        """The policy's own, and the layer budgets of each sequence."""
        under = begun(self.policy, _under(cache), canvas, model, x, interventions)
        cache = self._of_policy(cache, under)
        pairs = self.with_budgets(cache.shared.pairs, canvas, model, x, interventions)
        return self.counted(cache._replace(shared=cache.shared._replace(pairs=pairs)), canvas)

    def _evictable(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions of the prompt, padding included, that are not stored densely: kept or evicted."""
        dense = self.dense_positions(canvas.spec, canvas.layout)
        return canvas.everything & (canvas.position < canvas.layout.length - dense)

    # -- one denoising step: of the prompt all or nothing, else as the policy says ------------------------

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects the policy's positions; of the prompt all or none."""
        evictable, selected = self._evictable(canvas), self.policy.select(_under(cache), canvas)
        if canvas.spec.context.has_blocks:
            return selected
        due = _all_of(evictable & canvas.valid, selected)
        return jnp.where(due, selected | evictable, selected & ~evictable)

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """Attention to the kept pairs and the response, or to everything before the eviction."""
        q, k = layer.qk(x, rows.positions)
        v, shared = layer.value(x), cache.shared
        slots = self.dense_positions(canvas.spec, canvas.layout)
        cache, dense = cache.update(rows.last(slots), KV(k, v))

        if canvas.spec.context.has_blocks:
            new = KV(k, v)
            o, pairs = self.attend_in_blocks(layer, q, shared.pairs, dense, new, rows, canvas, cache.readable)
            return layer.finish(x, o), cache._replace(shared=shared._replace(pairs=pairs))

        # The prompt is due where all of it is selected, which takes a step at least as wide.
        step, pairs = LayerStep(layer, q, (rows, k), (rows, v), canvas, cache.readable), shared.pairs
        if 0 < canvas.layout.length - slots <= rows.index.shape[1]:
            due = _all_of(self._evictable(canvas), rows.mask())
            branch, pairs = self.attend_and_evict(step, pairs, dense, due, canvas.first_step | self.reselect)
        else:
            branch = self.attend_to_kept(step, pairs, dense)
        x = x + branch
        x = layer.residual(x + layer.mlp(x, stored=True))
        return x, cache._replace(shared=shared._replace(pairs=pairs))

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return self.policy.reads(_under(cache), canvas)

    def packed(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions that are kept as pairs or evicted; the others are stored densely."""
        return self.evictable(canvas) if canvas.spec.context.has_blocks else self._evictable(canvas)

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        """`RollingEviction`, which goes on selecting: its budget is of all earlier blocks; else the same."""
        require_blocks(spec, type(self).__name__, "Use Policy()")
        if not self.reselect:
            return self
        if type(self.policy) is not Policy:
            raise ValueError(
                f"reselect=True is not supported by EvictPrompt over {type(self.policy).__name__} on "
                f"block-causal models ({spec.family}): their prompt is computed once. "
                f"{calls_in_blocks(self, spec)}"
            )
        return rolling(self, spec)

    @override
    def _evicted(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return self.packed(canvas) & ~cache.shared.pairs.positions(canvas.layout.length)

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        return self._of_policy(cache, self.policy.before_layers(_under(cache), canvas, rows))

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
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        return self.policy.widths(spec, layout)

    def _of_policy(self, cache: Cache, under: Cache) -> Cache:
        """The cache with what the policy under it has changed, which shares but does not store."""
        shared = cache.shared._replace(policy=under.shared)
        return cache._replace(shared=shared, extra_positions=under.extra_positions)


def _under(cache: Cache) -> Cache:
    """The cache as the policy sees it."""
    return cache._replace(shared=cache.shared.policy)


def _all_of(positions: Bool[Array, "b l"], chosen: Bool[Array, "b l"]) -> Bool[Array, "b 1"]:
    """Whether a sequence has all of these positions chosen, and has any."""
    every = jnp.all(chosen | ~positions, axis=1, keepdims=True)
    return every & jnp.any(positions, axis=1, keepdims=True)
