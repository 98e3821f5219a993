"""Block-causal models read less: a block's first steps choose the stored pairs that its other steps read.

Finished blocks are final there, so that nothing of them is ever renewed: their dense pairs stay stored. The
chosen ones are gathered into a store of their own, which later steps of the block read with the block's.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import require_blocks
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, PositiveInt
from dllm_jax.policies.parts.block_votes import BlockScores
from dllm_jax.policies.parts.choosing_steps import ChoosingSteps, Reading
from dllm_jax.policies.parts.chosen_pairs import BlockPairs, attend_to_chosen, chosen_count, most
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, marked
from dllm_jax.traced import is_traced
from dllm_jax.xla.loops import REFRESH, when

CHOSEN, EXACT = "chosen", "exact"  # phases


@dataclasses.dataclass(frozen=True)
class ChosenReads(ChoosingSteps, BlockScores):
    """Base of policies for block-causal models whose first steps of a block choose what its others read.

    Attributes:
      keep: Pairs of earlier blocks to read, per layer and KV head: a number, or a fraction of them in [0, 1].
    """

    keep: PositiveInt | Fraction = 512

    _phases_by_positions: ClassVar[bool] = False

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        require_blocks(spec, type(self).__name__, "Use SparseDLLM() or DualCache()")
        pairs = BlockPairs(
            KV.zeros(spec, batch, layout.length, dtype),
            KV.zeros(spec, batch, self.slots(spec, layout), dtype, scattered=False),
        )
        return Cache(pairs, Reading.nothing(batch, layout.length))

    @property
    @override
    def _phases(self) -> tuple[str, ...]:
        """Steps of a block that read chosen pairs alone, and those of which some may be exact."""
        return (CHOSEN, EXACT) if is_traced(self.waits) or self.waits else ("",)

    @override
    def _phase(self, cache: Cache, canvas: Canvas) -> Int[Array, "b"]:
        return self.exact(cache.shared, canvas)[:, 0].astype(jnp.int32)

    def slots(self, spec: ModelSpec, layout: Layout) -> int:
        """Slots of what a block's steps read: the pairs chosen before the last block, and its own."""
        return most(self.keep, layout.length - 1) + spec.context.size

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """Exact steps attend to everything before the block's end, others to chosen pairs and their own."""
        q, k = layer.qk(x, rows.positions)
        new = KV(k, layer.value(x))

        # A step over the canvas is a first one, or the block is all there is.
        if rows.full:
            o, cache = self._exactly(layer, q, new, cache, rows, canvas)
            return layer.finish(x, o), cache

        # Sequences of a step may differ: some enter a block, for which it then is wide, others are in one.
        # The choice comes first: XLA copies a store that is written after it was read.
        exactly = lambda state: self._exactly(layer, q, new, state[1], rows, canvas)
        exact, exact_o = self.exact(cache.shared, canvas), None
        if not rows.in_one_block or rows.phase == EXACT:
            exact_o, cache = exactly((None, cache))
        elif canvas.spec.shifted and not rows.phase:
            some = jnp.any(exact & canvas.active[:, None])
            exact_o, cache = when(some, exactly, (jnp.zeros_like(q), cache), REFRESH)
        o, cache = attend_to_chosen(self.keep, layer, q, new, cache, rows, canvas)
        if exact_o is not None:
            o = jnp.where(exact[..., None, None], exact_o, o)
        return layer.finish(x, o), cache

    def _exactly(
        self, layer: Layer, q: Float[Array, "b q h d"], new: KV, cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q h d"], LayerCache]:
        """Attention to all pairs, the new ones among them; and the choice, where it is time for it."""
        cache = cache.write(rows, dense=new)
        dense = cache.read().dense
        o, lse = layer.attention(q, dense.k, dense.v, canvas.attends(rows), canvas.lookahead(rows))

        # What the block's steps will read, where it is time to choose.
        score = self.stored_scores(layer, q, dense.k, lse, rows, canvas)
        index = self.choice(layer, score, canvas, cache.read().chosen.k.shape[1])
        pairs = KV(*layer.sparse_gather(dense.k, dense.v, index))

        chooses = self.chooses(cache.shared, canvas)
        chosen = marked(index, canvas.layout.length) & chooses
        reading = cache.shared._replace(read=cache.shared.read | chosen)
        return o, cache._replace(shared=reading).replace(chooses[:, 0], pairs, part="chosen")

    @override
    def _dense_pairs(self, storage: Any) -> KV:
        return storage.dense

    def choice(
        self, layer: Layer, score: Float[Array, "b #k l"], canvas: Canvas, slots: int
    ) -> Int[Array, "b #k {slots}"]:
        """The positions that are read, ascending and padded with l, of each KV head or of all."""
        count = jnp.broadcast_to(chosen_count(self.keep, canvas)[:, None], score.shape[:2])
        return layer.topk_evict(score, count, slots)
