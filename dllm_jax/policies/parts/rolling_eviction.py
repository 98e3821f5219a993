"""Eviction that goes on in block-causal models: a budget for all earlier blocks, chosen at each block."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax import eviction
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import key_mask
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt
from dllm_jax.policies.base import Policy
from dllm_jax.policies.parts.block_votes import check_voters, mean_attention, queries_of_block
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, marked


class PlacedPairs(NamedTuple):
    """Storage of a layer: the kept pairs, and behind them the block's own.

    Attributes:
      pairs: Keys and values.
      position: Canvas position of each kept pair.
    """

    pairs: KV
    position: Int[Array, "*n b s k"]


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
        check_voters(self.votes, "with reselect=True on block-causal models")

    def slots(self, spec: ModelSpec, layout: Layout) -> int:
        """Slots of a layer: the kept pairs, and behind them the block's own."""
        return min(self.budget, layout.length) + spec.block_size

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        if spec.shifted:
            raise ValueError(
                f"reselect=True is not supported by EvictPrompt on {spec.family}: the step that enters a "
                "block unmasks a token that the block before it predicts. Use reselect=False, or MAGE()."
            )
        pairs = KV.zeros(spec, batch, self.slots(spec, layout), dtype, scattered=False)
        position = jnp.zeros(pairs.k.shape[:-1], jnp.int32)
        return Cache(PlacedPairs(pairs, position), shared=jnp.zeros((batch, layout.length), bool))

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """None but those of every block-causal model: a block, and two of them."""
        return ()

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """Forgets what was kept where layers choose again."""
        return cache._replace(shared=cache.shared & ~_enters(canvas))

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """Attention to kept and new pairs; and the choice, where a block is entered."""
        q, k = layer.qk(x, rows.index)
        new, block = KV(k, layer.value(x)), canvas.spec.block_size
        mask, stored = cache.attends(rows, canvas), canvas.before_model_block

        # A step over the canvas is a first one, or the canvas is all that is read: nothing kept is needed.
        if rows.full:
            o, lse = layer.attention(q, new.k, new.v, mask)
            seen, placed = stored | canvas.in_model_block, self._placed(new, rows)
            return layer.finish(x, o), self._choose(layer, q, placed, lse, seen, stored, cache, rows, canvas)

        # Within a block the kept pairs lie in front of its own, which take the last slots.
        room = cache.read().position.shape[1] - block
        if rows.index.shape[1] <= block:
            cache, both = cache.write_last(new, part="pairs")
            pairs = both.pairs
            kept = self._kept(canvas, room, jnp.zeros(len(x), jnp.int32))
            kept = jnp.pad(kept, ((0, 0), (0, block - k.shape[1])))
            own = key_mask(jnp.concatenate([kept, rows.real], axis=1))
            o, _ = layer.attention(q, pairs.k, pairs.v, own)
            return layer.finish(x, o), cache

        # Some sequences enter a block, and compute the finished one in front of it, which does not see it.
        finished = rows.take(stored) & rows.real
        kept = self._kept(canvas, room, jnp.sum(finished, axis=1))
        beside = lambda old, now: jnp.concatenate([old, now], axis=1)
        joined = lambda old, now: beside(old[:, :room], now)
        placed = jax.tree.map(joined, cache.read(), self._placed(new, rows))
        inside = rows.keys(mask)
        before = jnp.broadcast_to(kept[:, None, None], (*inside.shape[:3], room))
        keys, values = placed.pairs
        o, lse = layer.attention(q, keys, values, jnp.concatenate([before, inside], axis=3))
        seen, candidates = beside(kept, rows.real), beside(kept, finished)
        return layer.finish(x, o), self._choose(layer, q, placed, lse, seen, candidates, cache, rows, canvas)

    @staticmethod
    def _placed(new: KV, rows: Rows) -> PlacedPairs:
        """The pairs of the computed rows."""
        return PlacedPairs(new, jnp.broadcast_to(rows.index[..., None], new.k.shape[:-1]))

    def _kept(self, canvas: Canvas, room: int, finished: Int[Array, "b"]) -> Bool[Array, "b s"]:
        """Marks the slots of `room` that hold pairs, before `finished` positions of the step join them."""
        before = jnp.sum(canvas.before_model_block, axis=1) - finished
        return jnp.arange(room) < jnp.minimum(before, self.budget)[:, None]

    def _choose(
        self,
        layer: Layer,
        q: Float[Array, "b q h d"],
        placed: PlacedPairs,
        lse: Float[Array, "b h q"],
        seen: Bool[Array, "b s"],
        candidates: Bool[Array, "b s"],
        cache: LayerCache,
        rows: Rows,
        canvas: Canvas,
    ) -> LayerCache:
        """The cache with the best of the candidates kept, in sequences that enter a block.

        Args:
          layer: this layer's weights.
          q: rotated queries of the computed positions.
          placed: Pairs that they attend to.
          lse: log-sum-exp of that attention.
          seen: Pairs that the block attends to.
          candidates: Pairs of earlier blocks among them.
          cache: View of the storage.
          rows: the computed positions.
          canvas: State before the step.
        """
        own, q, lse = queries_of_block(q, lse, rows, canvas)
        pairs = placed.pairs
        score = mean_attention(self.votes, layer, q, pairs.k, lse, key_mask(seen), own, canvas)

        # The best ones in order of position, and room for the block's own behind them.
        score = jnp.where(candidates[:, None], score, -jnp.inf)
        count = jnp.minimum(jnp.sum(candidates, axis=1), self.budget)
        slots = cache.read().position.shape[1]
        index = layer.topk_evict(score, jnp.broadcast_to(count[:, None], score.shape[:2]), slots)
        padded = jnp.pad(placed.position, ((0, 0), (0, 1), (0, 0)), constant_values=canvas.layout.length)
        position = jnp.take_along_axis(padded, jnp.swapaxes(index, 1, 2), axis=1)
        kept = PlacedPairs(KV(*layer.sparse_gather(pairs.k, pairs.v, index)), position)

        enters = _enters(canvas)
        of_layer = marked(position, canvas.layout.length) & enters
        return cache._replace(shared=cache.shared | of_layer).replace(enters[:, 0], kept)


def _enters(canvas: Canvas) -> Bool[Array, "b 1"]:
    """Whether the coming step of a sequence chooses."""
    return canvas.enters_model_block & canvas.active[:, None]
