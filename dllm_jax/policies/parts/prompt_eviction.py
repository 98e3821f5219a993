"""Eviction of prompt pairs: what `MaskKV` and `EvictPrompt` share.

While the prompt is recomputed as a whole, queries attend to all of it, and each layer's heads choose the
pairs to keep. Until then nothing else of the prompt is stored: queries attend to the kept pairs, and to the
dense pairs of the canvas' last positions.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dllm_jax import eviction
from dllm_jax.eviction.store import PairStore, attend_to_kept, empty, prompt_pairs
from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import key_mask
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt
from dllm_jax.policies.base import Policy
from dllm_jax.policies.parts.block_votes import queries_of_block, rows_of_block
from dllm_jax.state.cache import KV, Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
from dllm_jax.xla.dependencies import after_on_cuda
from dllm_jax.xla.reductions import count_marked
from dllm_jax.xla.stacks import of_layer


class LayerStep(NamedTuple):
    """One layer in a step: what it computes, and what may be attended to.

    Attributes:
      layer: Weights of the layer.
      q: Rotated queries of the positions of `keys`.
      keys: Positions of the queries, and their new keys.
      values: Positions that are computed, those of the queries among them, and their new values.
      canvas: State before the step.
      readable: Positions that may be attended to (`LayerCache`); None for all that are not padding.
    """

    layer: Layer
    q: Float[Array, "b w h d"]
    keys: tuple[Rows, Float[Array, "b w k d"]]
    values: tuple[Rows, Float[Array, "b q k d"]]
    canvas: Canvas
    readable: Bool[Array, "b l"] | None

    @property
    def visible(self) -> Bool[Array, "b l"]:
        """Positions that may be attended to."""
        return self.canvas.shown(self.readable)


@dataclasses.dataclass(frozen=True)
class PromptEviction(Policy):
    """Base of policies that retain `budget` prompt KV pairs per layer and head, in storage of that size.

    Attributes:
      budget: Number of prompt KV pairs retained per layer and KV head, on average.
      layers: Distribution of the budget over layers. `BoundaryMiddle` needs the profile of your model;
        without it the distribution is uniform.
      heads: Distribution of a layer's budget over its KV heads.
      votes: Positions whose attention scores the KV pairs (`dllm_jax.eviction`).
    """

    budget: PositiveInt = 256
    layers: eviction.LayerBudgets = eviction.BoundaryMiddle()
    heads: eviction.HeadBudgets = eviction.PromptPreference()
    votes: eviction.Voters = eviction.MaskVotes()

    def __post_init__(self):
        super().__post_init__()
        self.layers.check()

    def empty_pairs(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> PairStore:
        """Room for the kept pairs of all layers and heads."""
        return empty(self.table(spec, layout), batch, spec.kv_heads, spec.head_dim, dtype)

    def with_budgets(
        self,
        pairs: PairStore,
        canvas: Canvas,
        model: Model,
        x: Float[Array, "b l m"],
        interventions: tuple[Intervention, ...],
    ) -> PairStore:
        """The store with the layer budgets of each sequence (MaskKV, equations 9-13)."""
        # Looked up by prompt length, since padding leaves sequences with shorter prompts.
        table, length = self.table(canvas.spec, canvas.layout), self._evictable_positions(canvas)
        by_length = jnp.asarray(table.T)
        budgets = by_length[:, length] if len(table) > 1 else by_length.repeat(len(length), axis=1)

        # The importance of the layers is measured only if the budgets ask for it.
        measure = lambda: eviction.importance(model, x, canvas.valid, canvas.valid, interventions)
        return pairs._replace(budget=self.layers.of_request(budgets, measure, self.budget, length))

    def evictable(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """The prompt; on block-causal models, its part in front of the block that decoding begins in."""
        context, layout = canvas.spec.context, canvas.layout
        if not context.has_blocks:
            return canvas.prompt
        end = jnp.full((len(canvas.valid), 1), layout.prompt)
        return canvas.prompt & (canvas.position < context.start(end, canvas.valid, layout.response_start))

    def _evictable_positions(self, canvas: Canvas) -> Int[Array, "b"]:
        """Number of positions that are evictable; of sequences that are padding alone any."""
        if canvas.layout.padded or canvas.spec.context.has_blocks:
            return count_marked(self.evictable(canvas))
        return jnp.full(len(canvas.valid), canvas.layout.prompt)

    def counting(self, cache: Cache, spec: ModelSpec, batch: int) -> Cache:
        """The cache before the first step, with a count of extra positions if layers are measured."""
        if not self.layers.online or cache.extra_positions is not None:
            return cache
        return cache._replace(extra_positions=jnp.zeros((batch, spec.layers)))

    def counted(self, cache: Cache, canvas: Canvas) -> Cache:
        """The cache with the positions of the pass that measures the layers counted, if there was one."""
        if not self.layers.online or cache.extra_positions is None:
            return cache
        passed = jnp.sum(canvas.valid, axis=1, keepdims=True)
        return cache._replace(extra_positions=cache.extra_positions + passed)

    def attend_to_kept(self, step: LayerStep, pairs: PairStore, dense: KV) -> Float[Array, "b w m"]:
        """The attention branch between refreshes (prompt-state exclusion): response and kept pairs."""
        layer, canvas = step.layer, step.canvas
        widest = self.widest_head(canvas.spec, canvas.layout)
        visible = step.visible[:, None, None, canvas.layout.length - dense.k.shape[1] :]
        o = attend_to_kept(layer, step.q, pairs, dense, visible, self.budget, widest, step.readable)
        return layer.out(o)

    def attend_and_evict(
        self,
        step: LayerStep,
        pairs: PairStore,
        dense: KV,
        due: Bool[Array, "b 1"],
        chooses: Bool[Array, "b 1"],
        all_due: bool = False,
    ) -> tuple[Float[Array, "b w m"], PairStore]:
        """Attention to the whole prompt where it is due, and the eviction; to the kept pairs elsewhere.

        Args:
          step: The layer and what it computes.
          pairs: the kept pairs of all layers.
          dense: K and V of the canvas' last t positions [b t k d], the new ones among them.
          due: sequences all of whose prompt is computed.
          chooses: sequences that choose their pairs again if they are due; the others renew those they have.
          all_due: Whether all active sequences are due, in a full step.

        Returns:
          the attention branch, and the changed store.
        """
        layer, q, keys, values, canvas, readable = step
        columns = canvas.layout.length - dense.k.shape[1]
        real = step.visible[:, None, None, columns:]
        if all_due:
            prompt_k, prompt_v = keys[1][:, :columns], values[1][:, :columns]
            unread = canvas.layout.padded or readable is not None
            mask = key_mask(step.visible) if unread else None
        else:
            prompt = canvas.prompt & canvas.shown(readable)
            prompt_k, prompt_v, in_prompt = prompt_pairs(
                pairs, layer.entry, due, keys, values, prompt, columns, readable
            )
            in_response = jnp.broadcast_to(real, (*in_prompt.shape[:3], dense.k.shape[1]))
            mask = jnp.concatenate([in_prompt, in_response], axis=-1)
        k = jnp.concatenate([prompt_k, dense.k], axis=1)
        v = jnp.concatenate([prompt_v, dense.v], axis=1)
        o, lse = layer.attention(q, k, v, mask, reads_lse=True)

        # Equations 7 and 14: votes and each head's preference choose what is kept (equation 16). What is
        # dense needs no pair.
        seen = eviction.evidence(self.votes, layer, q, k, lse, mask, keys[0], canvas)
        packed = np.arange(canvas.layout.prompt) < columns
        votes, seen = seen.votes, seen._replace(votes=jnp.where(packed, seen.votes, -jnp.inf))
        pairs = self.keep_best(layer, pairs, seen, (prompt_k, prompt_v), due & chooses, due, canvas)
        return after_on_cuda(votes, layer.out(o)), pairs

    def attend_in_blocks(
        self,
        layer: Layer,
        q: Float[Array, "b q h d"],
        pairs: PairStore,
        dense: KV,
        new: KV,
        rows: Rows,
        canvas: Canvas,
        readable: Bool[Array, "b l"] | None = None,
    ) -> tuple[Float[Array, "b q h d"], PairStore]:
        """The same on block-causal models, whose first step alone computes the prompt, and evicts.

        Args:
          layer: this layer's weights.
          q: rotated queries of the computed positions.
          pairs: the kept pairs of all layers.
          dense: K and V of the canvas' last t positions [b t k d], the new ones among them.
          new: K and V of the computed positions.
          rows: the computed positions.
          canvas: state before the step.
          readable: Positions that may be attended to (`LayerCache`).

        Returns:
          the attention output, before the output projection, and the changed store.
        """
        evictable, mask, layout = self.evictable(canvas), canvas.attends(rows, readable), canvas.layout
        assert mask is not None, "block-causal"
        if not rows.full or not layout.prompt:
            visible = (mask & ~evictable[:, None, None])[..., layout.length - dense.k.shape[1] :]
            widest = self.widest_head(canvas.spec, layout)
            return attend_to_kept(layer, q, pairs, dense, visible, self.budget, widest, readable), pairs

        # A full step is a first one: it computes everything, and the block's rows vote, or the prompt's.
        o, lse = layer.attention(q, new.k, new.v, mask, canvas.lookahead(rows))
        block, size = canvas.in_model_block, canvas.spec.context.size
        if not self.votes.of_prompt and size < rows.index.shape[1]:
            of_block = rows_of_block(canvas)
            mask = canvas.attends(of_block, readable)
            assert mask is not None, "block-causal"
            q, lse = queries_of_block(layer, q, new.k, lse, rows, of_block, mask)
            rows = of_block
        seen = eviction.evidence(self.votes, layer, q, new.k, lse, mask, rows, canvas, block)
        candidate = evictable[:, None, : layout.prompt]
        seen = seen._replace(votes=jnp.where(candidate, seen.votes, -jnp.inf))
        prompt = new.k[:, : layout.prompt], new.v[:, : layout.prompt]
        first = canvas.first_step & canvas.active[:, None]
        return o, self.keep_best(layer, pairs, seen, prompt, first, first, canvas)

    def keep_best(
        self,
        layer: Layer,
        pairs: PairStore,
        seen: eviction.Evidence,
        prompt: tuple[Float[Array, "b p k d"], Float[Array, "b p k d"]],
        chooses: Bool[Array, "b 1"],
        due: Bool[Array, "b 1"],
        canvas: Canvas,
    ) -> PairStore:
        """The store with the best pairs of one layer.

        Args:
          layer: this layer's weights.
          pairs: the kept pairs of all layers.
          seen: votes of the prompt positions, and each head's preference.
          prompt: Keys and values of the prompt, new where it is due.
          chooses: sequences that choose their pairs.
          due: sequences whose pairs are overwritten.
          canvas: state before the step.
        """
        widest = self.widest_head(canvas.spec, canvas.layout)
        budget = of_layer(pairs.budget, layer.entry)
        of_all_heads = layer.kernels.of_all_heads
        seen = seen._replace(preference=of_all_heads(seen.preference))
        count = self.heads.budgets(seen, budget, self._evictable_positions(canvas))
        position = layer.topk_evict(seen.votes, of_all_heads(count), widest)

        # Layers lie one after the other in the store, each with the room of its budget. What was chosen
        # before is renewed.
        before = jnp.cumsum(pairs.budget, axis=0) - pairs.budget
        first_slot = of_layer(before, layer.entry) * canvas.spec.kv_heads
        room = self.widest_layer(canvas.spec, canvas.layout) * canvas.spec.kv_heads
        pairs, window = pairs.allot(layer, first_slot, position, canvas.layout.prompt, chooses, room)
        return pairs.renew(window, *prompt, due)

    def widest_head(self, spec: ModelSpec, layout: Layout) -> int:
        """Upper bound of the pairs that a KV head keeps in any layer."""
        return self.heads.widest(self.widest_layer(spec, layout), spec.kv_heads, layout.prompt)

    def widest_layer(self, spec: ModelSpec, layout: Layout) -> int:
        """Upper bound of a layer's pairs per KV head, on average over its heads."""
        return self.layers.widest(self.table(spec, layout), self.budget, layout.prompt)

    def table(self, spec: ModelSpec, layout: Layout) -> Int[np.ndarray, "lengths n"]:
        """Pairs per KV head of each layer, as far as known before the run; see `eviction.table`."""
        return eviction.table(self.layers, spec.layers, self.budget, layout, spec.context.shared + 1)
