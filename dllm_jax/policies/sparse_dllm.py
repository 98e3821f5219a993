"""Sparse-dLLM: dynamic eviction from both sides of the block (arXiv:2508.02558)."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import Mask, key_mask, require_blocks, require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, Odd, PositiveInt, TracedNonNegativeInt
from dllm_jax.options.hints import Renamed
from dllm_jax.policies.base import Policy, for_model
from dllm_jax.policies.parts.chosen_reads import ChosenReads
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, marked
from dllm_jax.state.selection import fraction_of, max_pool, mean_query_score
from dllm_jax.traced import Count
from dllm_jax.xla.reductions import count_marked


@dataclasses.dataclass(frozen=True)
class SparseDLLM(Policy):
    """Evicts the least important KV pairs outside the current block, once per block and layer (Sparse-dLLM).

    Use it when the KV cache does not fit in memory. It needs 1 + delay full steps per block, `DualCache`
    one.

    The first 1 + delay steps of a block are full steps. The last one scores all keys outside the block by the
    block's mean query and max-pools the scores over neighbors (Algorithms 1 and 4). It retains a fraction
    `keep` of the KV pairs, the same ones for all heads of a layer. Later steps recompute the block and attend
    to the retained pairs and to the block.

    With a shifted output head the positions that predict the block are recomputed. The KV pair of the block's
    last position is always retained, as in `DualCache`, which this policy is with keep=1, delay=0.

    On block-causal models and DiffusionGemma nothing is evicted. The step that would evict chooses, for each
    of the model's blocks or canvases, the pairs before it that its other steps attend to; `side` has no
    effect.

    Memory: [n b s k d] for keys and for values, with s = int((l - block) * keep) + block; with side="prefix"
    s = int(prompt * keep) + response. A shifted output head has one slot more. Where nothing is evicted
    s = int((l - 1) * keep) + block, and dense keys and values for all positions besides.

    Limits: Accuracy falls quickly with small `keep`, and in blocks whose tokens need different parts of the
    prompt.

    Equals exact decoding when: every block takes at most 1 + delay steps; with nothing evicted also keep=1.
    Differences: Batches and padding work; each sequence retains a fraction of its own candidates. On Dream no
      token is unmasked unconditionally. Scores are float32 in every dtype, and ties go to the lower position.
      Even kernels raise `ValueError`, because they give one score too many.

    Attributes:
      keep: Fraction of the KV pairs outside the block to retain, in [0, 1] (retention ratio r).
      kernel: Window of the max pooling over positions, odd. 1 disables pooling.
      delay: Number of full steps of a block before the one that fills the cache.
      side: Region of the eviction: "both" sides of the block, or its "prefix" only (Algorithm 5).
    """

    keep: Fraction = 0.5
    kernel: Annotated[PositiveInt, Odd()] = 3
    delay: TracedNonNegativeInt = 1
    side: Literal["both", "prefix"] = "both"

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """Room for the pairs of the first block, with side="prefix" later blocks keep fewer, and its own."""
        require_full_attention(spec, type(self).__name__)
        outside = layout.length - layout.shortest_block
        candidates = outside if self.side == "both" else layout.prompt
        slots = int(candidates * self.keep) + (outside - candidates) + spec.shifted + layout.block
        return Cache(
            KV.zeros(spec, batch, slots, dtype, scattered=False), jnp.zeros((batch, layout.length), bool)
        )

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first 1 + delay steps of a block, then the positions that predict it."""
        return (canvas.block_step <= self.delay)[:, None] | self.recomputed(canvas)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        return (layout.block,)

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """Full steps attend to the canvas, and one fills the cache; the block attends to it and itself."""
        q, k = layer.qk(x, rows.positions)
        new = KV(k, layer.value(x))

        # The exact layer; the last full step also scores its keys and stores the best pairs (Algorithm 1).
        if rows.full:
            o, _ = layer.attention(q, new.k, new.v, cache.attends(rows, canvas))
            cache = self._store(layer, cache, q, new, canvas)
        # A partial step attends to the stored pairs and, in the last slots, to its own. What it recomputes is
        # no more than a block, and padding comes last.
        else:
            width = min(rows.index.shape[1], canvas.layout.block)
            cache, both = cache.write_last(jax.tree.map(lambda a: a[:, :width], new))
            o, _ = layer.attention(q, both.k, both.v, self._attends(rows, canvas, both.k.shape[1], width))
        return layer.finish(x, o, stored=True), cache

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """Forgets what was retained where layers choose again."""
        return cache._replace(shared=cache.shared & ~self._fills(canvas)[:, None])

    # -- sets of positions: recomputed, always stored, stored if important --------------------------

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        """`SparseBlocks`: nothing is stale there, so what would be evicted stays stored and is not read."""
        if spec.has_mask_token:
            require_blocks(spec, type(self).__name__, "Use Policy()")
        return for_model(SparseBlocks(float(self.keep), self.kernel, self.delay), spec)

    @override
    def _evicted(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return canvas.valid & ~cache.shared

    def recomputed(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions recomputed in every step, so never stored."""
        return canvas.predicting_positions(canvas.block)

    def always_stored(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions stored whatever their importance."""
        stored = canvas.block if self.side == "both" else canvas.suffix
        return stored & canvas.valid & ~self.recomputed(canvas)

    candidates = Renamed("candidates", "evictable")

    def evictable(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """Positions stored if they are important enough."""
        return canvas.valid & ~self.recomputed(canvas) & ~self.always_stored(canvas)

    def importance(
        self, q: Float[Array, "b l h d"], k: Float[Array, "b l k d"], canvas: Canvas
    ) -> Float[Array, "b l"]:
        """Pooled score of each candidate in this layer (Algorithm 1), -inf elsewhere."""
        score = mean_query_score(q, k, canvas.block & canvas.valid)
        return max_pool(score, self.evictable(canvas), self.kernel)

    def retained(
        self, layer: Layer, q: Float[Array, "b l h d"], k: Float[Array, "b l k d"], canvas: Canvas, slots: int
    ) -> Int[Array, "b 1 {slots}"]:
        """The positions a layer stores, one list for all its heads, ascending and padded with l.

        Args:
          layer: the layer, which chooses the best.
          q: queries of the step that fills the cache.
          k: its keys.
          canvas: state before the step.
          slots: positions of the list, at least as many as are stored.
        """
        # Pairs that are stored at any importance come before all others.
        score = jnp.where(self.always_stored(canvas), jnp.inf, self.importance(q, k, canvas))
        return layer.topk_evict(score[:, None], self._filled(canvas)[:, None], slots)

    # -- storage ------------------------------------------------------------------------------------

    def _budget(self, canvas: Canvas) -> Int[Array, "b"]:
        """Number of candidates that are stored: the retention ratio of those that a sequence has."""
        return fraction_of(count_marked(self.evictable(canvas)), self.keep, canvas.layout.length)

    def _filled(self, canvas: Canvas) -> Int[Array, "b"]:
        """Number of stored pairs, those included that are stored whatever their importance."""
        return self._budget(canvas) + count_marked(self.always_stored(canvas))

    def _store(
        self, layer: Layer, cache: LayerCache, q: Float[Array, "b l h d"], new: KV, canvas: Canvas
    ) -> LayerCache:
        """Writes the retained pairs in ascending order from slot 0 on, where the step fills the cache."""
        # Retained pairs are packed to the left; slots after them hold anything and are never read.
        slots = cache.read().k.shape[1]
        index = self.retained(layer, q, new.k, canvas, slots)
        pairs = KV(*layer.sparse_gather(new.k, new.v, index))

        # A sequence that has finished the block keeps its pairs, at whichever step it stopped.
        fills = self._fills(canvas)
        of_layer = marked(index, canvas.layout.length) & fills[:, None]
        return cache._replace(shared=cache.shared | of_layer).replace(fills, pairs)

    def _fills(self, canvas: Canvas) -> Bool[Array, "b"]:
        """The sequences whose coming step fills the cache."""
        return canvas.active & (canvas.block_step == self.delay)

    def _attends(self, rows: Rows, canvas: Canvas, slots: int, width: int) -> Mask | None:
        """Keys that a partial step attends to: filled slots, and its own in the last ones but for padding."""
        # Of whole blocks and prompts without padding all slots are filled: so no mask is made, for which some
        # implementations copy what it hides.
        layout, uneven = canvas.layout, canvas.spec.shifted or self.side == "prefix"
        uneven = uneven or layout.shorter_last
        if not (uneven or layout.padded or layout.tail or layout.suffix) and width == layout.block:
            return None
        stored = jnp.arange(slots - width) < self._filled(canvas)[:, None]
        computed = rows.take(canvas.valid) & rows.real
        return key_mask(jnp.concatenate([stored, computed[:, :width]], axis=1))


# -- Sparse-dLLM on block-causal models ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SparseBlocks(ChosenReads):
    """Attends to the stored pairs that the block's mean query scores highest, one list for all heads.

    The first `delay` steps of a model's block are exact, and so is the next one, which chooses.

    Attributes:
      keep: Fraction of the pairs of earlier blocks to attend to.
      kernel: Window of the max pooling over stored positions, odd.
      delay: Exact steps of a block before the one that chooses.
    """

    keep: PositiveInt | Fraction = 0.5
    kernel: Annotated[PositiveInt, Odd()] = 3
    delay: TracedNonNegativeInt = 1

    @property
    @override
    def waits(self) -> Count:
        return self.delay

    @override
    def scores(
        self,
        layer: Layer,
        q: Float[Array, "b w h d"],
        k: Float[Array, "b l k d"],
        lse: Float[Array, "b h w"],
        mask: Mask,
        rows: Rows,
        canvas: Canvas,
    ) -> Float[Array, "b 1 l"]:
        """The product of each key with the block's mean query, averaged over heads and pooled."""
        score = mean_query_score(q, k, rows.real)
        return max_pool(score, canvas.before_model_block, self.kernel)[:, None]
