"""Eviction that goes on in block-causal models: a budget for all earlier blocks, chosen at each block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax import eviction
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import Mask, require_blocks
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt
from dllm_jax.policies.base import Policy
from dllm_jax.policies.mage import MAGE
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, compact_rows, gather


@dataclasses.dataclass(frozen=True)
class RollingEviction(Policy):
    """Stores `budget` pairs of earlier blocks per layer and KV head, and the block: `EvictPrompt` there.

    The step that enters a block computes the finished one too. Its rows read the kept pairs and both blocks;
    the new block's votes then rank the kept pairs and those of the finished block, and the best ones stay.
    What is evicted is gone. The method is ours.

    Attributes:
      budget: Pairs of earlier blocks to keep, per layer and KV head.
      votes: Positions of the block whose attention scores the pairs.
    """

    budget: PositiveInt = 256
    votes: eviction.Voters = eviction.PredictingVotes()

    def __post_init__(self):
        super().__post_init__()
        if self.votes.of_prompt:
            raise ValueError(
                f"votes={self.votes!r} is not supported with reselect=True on block-causal models: steps of "
                "later blocks compute no prompt position. Use MaskVotes()."
            )

    @property
    def chooser(self) -> MAGE:
        """Scores pairs by the attention of the block's voters."""
        return MAGE(self.budget, self.votes)

    def slots(self, spec: ModelSpec, layout: Layout) -> int:
        """Slots of a layer: the kept pairs, and behind them the block's own."""
        return min(self.budget, layout.length) + spec.block_size

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        require_blocks(spec, type(self).__name__, "Use EvictPrompt()")
        if spec.shifted:
            raise ValueError(
                f"reselect=True is not supported by EvictPrompt on {spec.family}: the step that enters a "
                "block unmasks a token that the block before it predicts. Use reselect=False, or MAGE()."
            )
        return Cache(KV.zeros(spec, batch, self.slots(spec, layout), dtype, scattered=False), shared=())

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """None but those of every block-causal model: a block, and two of them."""
        return ()

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """Attention to kept and new pairs; and the choice, where a block is entered."""
        q, k = layer.qk(x, rows.index)
        new, block = KV(k, layer.value(x)), canvas.spec.block_size
        mask = cache.attends(rows, canvas)
        assert mask is not None, "block-causal"

        # A step over the canvas is a first one, or the canvas is all that is read: nothing kept is needed.
        if rows.full:
            o, lse = layer.attention(q, new.k, new.v, mask)
            candidates = canvas.before_model_block
            return layer.finish(x, o), self._choose(layer, q, new, lse, mask, candidates, cache, rows, canvas)

        # Within a block the kept pairs lie in front of its own, which take the last slots.
        inside = self._inside(mask, rows)
        if rows.index.shape[1] <= block:
            cache, pairs = cache.write_last(new)
            kept = self._kept(canvas, pairs.k.shape[1] - block, jnp.zeros(len(x), jnp.int32))
            kept = jnp.pad(kept, ((0, 0), (0, block - k.shape[1])))
            o, _ = layer.attention(q, pairs.k, pairs.v, _both(kept, inside))
            return layer.finish(x, o), cache

        # Some sequences enter a block, and compute the finished one in front of it.
        finished = rows.take(canvas.before_model_block) & rows.real
        room = cache.read().k.shape[1] - block
        kept = self._kept(canvas, room, jnp.sum(finished, axis=1))
        every = jax.tree.map(
            lambda old, now: jnp.concatenate([old[:, :room], now], axis=1), cache.read(), new
        )
        mask = _both(kept, inside)
        o, lse = layer.attention(q, every.k, every.v, mask)
        candidates = jnp.concatenate([kept, finished], axis=1)
        return layer.finish(x, o), self._choose(layer, q, every, lse, mask, candidates, cache, rows, canvas)

    def _kept(self, canvas: Canvas, room: int, finished: Int[Array, "b"]) -> Bool[Array, "b s"]:
        """Marks the slots of `room` that hold pairs, before `finished` positions of the step join them."""
        before = jnp.sum(canvas.before_model_block, axis=1) - finished
        return jnp.arange(room) < jnp.minimum(before, self.budget)[:, None]

    def _inside(self, mask: Mask, rows: Rows) -> Bool[Array, "b 1 q q"]:
        """Marks the rows of a step that each of its rows attends to."""
        column = jnp.minimum(rows.index, mask.shape[3] - 1)[:, None, None]
        found = jnp.take_along_axis(
            mask, jnp.broadcast_to(column, (len(column), 1, mask.shape[2], column.shape[3])), 3
        )
        return found & rows.real[:, None, None]

    def _choose(
        self,
        layer: Layer,
        q: Float[Array, "b q h d"],
        pairs: KV,
        lse: Float[Array, "b h q"],
        mask: Mask,
        candidates: Bool[Array, "b s"],
        cache: LayerCache,
        rows: Rows,
        canvas: Canvas,
    ) -> LayerCache:
        """The cache with the best of the candidates kept, in sequences that enter a block."""
        own = compact_rows(canvas.in_model_block, canvas.spec.block_size)
        place = rows.slot(own.index)
        lse = jnp.swapaxes(gather(jnp.swapaxes(lse, 1, 2), place), 1, 2)
        by_query = jnp.broadcast_to(mask, (len(q), 1, q.shape[1], mask.shape[3]))
        mask = jnp.swapaxes(gather(jnp.swapaxes(by_query, 1, 2), place), 1, 2)
        score = self.chooser.scores(layer, gather(q, place), pairs.k, lse, mask, own, canvas)

        # The best ones in order of position, and room for the block's own behind them.
        score = jnp.where(candidates[:, None], score, -jnp.inf)
        count = jnp.minimum(jnp.sum(candidates, axis=1), self.budget)
        slots = cache.read().k.shape[1]
        index = layer.topk_evict(score, jnp.broadcast_to(count[:, None], score.shape[:2]), slots)
        enters = canvas.enters_model_block[:, 0] & canvas.active
        return cache.replace(enters, KV(*layer.sparse_gather(pairs.k, pairs.v, index)))


def _both(kept: Bool[Array, "b s"], inside: Bool[Array, "b 1 q r"]) -> Bool[Array, "b 1 q s_r"]:
    """The mask of keys in two parts: kept pairs, which all rows see, and the step's own."""
    every = jnp.broadcast_to(kept[:, None, None], (*inside.shape[:3], kept.shape[1]))
    return jnp.concatenate([every, inside], axis=3)
