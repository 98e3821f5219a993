"""Block-causal models read less: a block's first steps choose the stored pairs that its other steps read.

Finished blocks are final there, so that nothing of them is ever renewed: their dense pairs stay stored. The
chosen ones are gathered into a store of their own, which later steps of the block read with the block's.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import Mask, key_mask, require_blocks
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, PositiveInt
from dllm_jax.policies.base import Phase, Policy, as_kind
from dllm_jax.policies.parts.block_votes import queries_of_block, rows_of_block
from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, marked
from dllm_jax.state.selection import fraction_of
from dllm_jax.traced import Count, is_traced
from dllm_jax.xla.loops import REFRESH, when

CHOSEN, EXACT = "chosen", "exact"  # phases


class Reading(NamedTuple):
    """State that layers and steps share.

    Attributes:
      read: Positions of earlier blocks that some head of some layer has chosen.
      steps: Steps since the model's block was entered.
    """

    read: Bool[Array, "b l"]
    steps: Int[Array, "b"]

    @staticmethod
    def nothing(batch: int, length: int) -> "Reading":
        """The state before the first step."""
        return Reading(jnp.zeros((batch, length), bool), jnp.zeros((batch,), jnp.int32))


class BlockPairs(NamedTuple):
    """Storage of a layer.

    Attributes:
      dense: Pairs of all positions.
      chosen: Pairs of earlier blocks that the block's steps read, and in the last slots the block's own.
    """

    dense: KV
    chosen: KV


@dataclasses.dataclass(frozen=True)
class ChosenReads(Policy, abc.ABC):
    """Base of policies for block-causal models whose first steps of a block choose what its others read.

    Attributes:
      keep: Pairs of earlier blocks to read, per layer and KV head: a number, or a fraction of them in [0, 1].
    """

    keep: PositiveInt | Fraction = 512

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        return self if spec.has_mask_token else as_kind(self, InCanvas)

    def check_model(self, spec: ModelSpec):
        """Raises ValueError for models without finished blocks."""
        require_blocks(spec, type(self).__name__, "Use SparseDLLM() or DualCache()")

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        self.check_model(spec)
        pairs = BlockPairs(
            KV.zeros(spec, batch, layout.length, dtype),
            KV.zeros(spec, batch, self.slots(spec, layout), dtype, scattered=False),
        )
        return Cache(pairs, Reading.nothing(batch, layout.length))

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        """Steps of a block that read chosen pairs alone, and those of which some may be exact."""
        if not (is_traced(self.waits) or self.waits):
            return (Phase(by_positions=False),)
        exact = lambda cache, canvas: self.exact(cache.shared, canvas)[:, 0]
        return Phase(CHOSEN, by_positions=False), Phase(EXACT, needed=exact, by_positions=False)

    def slots(self, spec: ModelSpec, layout: Layout) -> int:
        """Slots of what a block's steps read: the pairs chosen before the last block, and its own."""
        return self._most(layout.length - 1) + spec.context.size

    @property
    def waits(self) -> Count:
        """Exact steps of a block before the one that chooses."""
        return 0

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """None but those of every block-causal model: a block, and two of them."""
        return ()

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything that is not final: the model's block."""
        return canvas.everything

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in exact steps, then the block and what any head of any layer has chosen."""
        readable = canvas.in_model_block | cache.shared.read
        return jnp.where(self.exact(cache.shared, canvas), canvas.valid, readable)

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        read = cache.shared.read & ~self.chooses(cache.shared, canvas)
        return cache._replace(shared=cache.shared._replace(read=read))

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        steps = jnp.where(canvas.active, _steps(cache.shared, canvas)[:, 0] + 1, cache.shared.steps)
        return cache._replace(shared=cache.shared._replace(steps=steps))

    def exact(self, reading: Reading, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether the coming step of a sequence reads everything."""
        return _steps(reading, canvas) <= self.waits

    def chooses(self, reading: Reading, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether the coming step chooses: one after a first token that another block predicts, if any."""
        chooses = _steps(reading, canvas) == self.waits
        return chooses & ~canvas.opens_model_block & canvas.active[:, None]

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
            needed = jnp.any(exact & canvas.active[:, None])
            exact_o, cache = when(needed, exactly, (jnp.zeros_like(q), cache), REFRESH)
        o, cache = self._sparsely(layer, q, new, cache, rows, canvas)
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

    def _sparsely(
        self, layer: Layer, q: Float[Array, "b q h d"], new: KV, cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q h d"], LayerCache]:
        """Attention to the chosen pairs and to the block's own, which come first among the rows."""
        context = canvas.spec.context
        width = min(rows.index.shape[1], context.size)
        cache, both = cache.write_last(jax.tree.map(lambda a: a[:, :width], new), part="chosen")
        pairs, layout = both.chosen, canvas.layout
        slots = pairs.k.shape[1] - width

        # Without a mask where all slots are filled from the first block on, to the last one.
        whole = layout.prompt // context.size * context.size
        least = 0 if layout.padded or context.from_response else whole
        if width == context.size and self._most(least) == slots and not layout.shorter_last:
            mask = None
        else:
            filled = jnp.arange(slots) < self._count(canvas)[:, None]
            mask = key_mask(jnp.concatenate([filled, rows.real[:, :width]], axis=1))
        o, _ = layer.attention(q, pairs.k, pairs.v, mask)
        return o, cache

    @override
    def _dense_pairs(self, storage: Any) -> KV:
        return storage.dense

    def choice(
        self, layer: Layer, score: Float[Array, "b #k l"], canvas: Canvas, slots: int
    ) -> Int[Array, "b #k {slots}"]:
        """The positions that are read, ascending and padded with l, of each KV head or of all."""
        count = jnp.broadcast_to(self._count(canvas)[:, None], score.shape[:2])
        return layer.topk_evict(score, count, slots)

    def _count(self, canvas: Canvas) -> Int[Array, "b"]:
        """Number of pairs that the block's steps read of earlier blocks."""
        stored = jnp.sum(stored_pairs(canvas), axis=1)
        if isinstance(self.keep, int):
            return jnp.minimum(stored, self.keep)
        return fraction_of(stored, self.keep, canvas.layout.length)

    def _most(self, stored: int) -> int:
        """The same of so many stored pairs."""
        return min(self.keep, stored) if isinstance(self.keep, int) else int(stored * self.keep)

    @abc.abstractmethod
    def scores(
        self,
        layer: Layer,
        q: Float[Array, "b w h d"],
        k: Float[Array, "b l k d"],
        lse: Float[Array, "b h w"],
        mask: Mask,
        rows: Rows,
        canvas: Canvas,
    ) -> Float[Array, "b #k l"]:
        """Scores of the stored pairs, of each KV head or of all; read at `canvas.before_model_block`.

        Args:
          layer: this layer's weights.
          q: rotated queries of the positions of the model's block.
          k: rotated keys of all positions.
          lse: log-sum-exp of these queries' attention.
          mask: Keys that they attend to.
          rows: the positions of the model's block.
          canvas: state before the step.
        """

    def stored_scores(
        self,
        layer: Layer,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b l k d"],
        lse: Float[Array, "b h q"],
        rows: Rows,
        canvas: Canvas,
    ) -> Float[Array, "b #k l"]:
        """Scores of the stored pairs, -inf elsewhere; arguments as for `scores`, but of all computed rows."""
        # The block's rows score; its own pairs are read in any case, and do not count.
        stored, block = stored_pairs(canvas), canvas.in_model_block
        of_block, mask = rows_of_block(canvas), key_mask(stored | block)
        q, lse = queries_of_block(layer, q, k, lse, rows, of_block, mask)
        score = self.scores(layer, q, k, lse, mask, of_block, canvas)
        return jnp.where(stored[:, None], score, -jnp.inf)


class InCanvas(ChosenReads):
    """The same in the canvas of a model without a mask token: all of it votes in its first denoising step."""

    @override
    def check_model(self, spec: ModelSpec):
        """Does nothing: a causal pass precedes the step that chooses, as the model's canvas knows."""

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        exact = lambda cache, canvas: self.exact(cache.shared, canvas)[:, 0]
        return Phase(CHOSEN, by_positions=False), Phase(EXACT, needed=exact, by_positions=False)

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        # Causal passes are exact, so that the rows of other steps are those of the canvas.
        alone = not rows.full and rows.index.shape[1] <= canvas.spec.context.size
        undecided = canvas.block & ~canvas.causal
        canvas = dataclasses.replace(canvas, tokens=jnp.where(undecided, canvas.spec.mask_id, canvas.tokens))
        return super().layer(layer, x, cache, dataclasses.replace(rows, in_one_block=alone), canvas)


def stored_pairs(canvas: Canvas) -> Bool[Array, "b l"]:
    """Positions of earlier blocks whose pairs the layer may read: all, or those in its window."""
    stored, window = canvas.before_model_block, canvas.spec.window
    return stored if window is None else stored & (canvas.position > canvas.model_block - window)


def _steps(reading: Reading, canvas: Canvas) -> Int[Array, "b 1"]:
    """Steps of the model's block before the coming one; an opening one does not count."""
    return jnp.where(canvas.enters_model_block, 0, reading.steps[:, None])
