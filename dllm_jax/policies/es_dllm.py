"""ES-dLLM: rows that will not be decoded leave a step in early layers (arXiv:2603.10088)."""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Gt, Le, MinLen
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, NoneMeans, PositiveInt, TracedPositiveInt
from dllm_jax.policies.base import Policy
from dllm_jax.policies.parts import es_dllm_rows
from dllm_jax.policies.parts.es_dllm_rows import Skipping
from dllm_jax.policies.sparse_dllm import SparseDLLM
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows
from dllm_jax.state.selection import best, fraction_of, max_pool, mean_query_score
from pallas_kernels.counting import count_marked


class WithCopies(NamedTuple):
    """Keys and values, and what they were when a block retained some of them."""

    k: Float[Array, "*n b l k d"]
    v: Float[Array, "*n b l k d"]
    copies: KV


@dataclasses.dataclass(frozen=True)
class ESDLLM(Policy):
    """Lets rows of the block leave a step in early layers, by confidence and change (ES-dLLM).

    Use it where the number of computed tokens limits a step: batches of 8 and more, long blocks.

    As `DualCache`, with the positions before the block renewed at intervals, and all of them only in the
    first step. At a few depths each row is scored by its confidence in earlier steps, and by how much it has
    changed since it last ran there. The best rows go on; the others keep their KV pairs in later layers, and
    the step does not unmask their tokens. Every `block_every` steps, all rows of the block run all layers.

    With `evict` the step after the first `evict.delay` of a block is whole. Each layer then retains the pairs
    outside of the block that Sparse-dLLM would, and the block's later steps attend to them.

    Memory: Dense keys and values for all positions, and the stored rows of each depth, response only. Evicted
      pairs stay there, as in the reference, twice unless `prompt_every` is a multiple of the block.

    Limits: Needs an integer block, and no guidance, constraints, `early_commit` or `Edit`. At batch 1, short
      blocks save nothing on GPUs.

    Equals exact decoding when: prompt_every=1 in one block, if the output head is not shifted.
    Differences: Slots, quotas and what was just decoded are counted per sequence, so a batch changes nothing.
      Stored rows and scores are float32 or of the model's dtype, and ties go to the lower position.

    Attributes:
      prompt_every: Slots between steps that renew everything before the block. The scripts use 64, or 256.
      block_every: Slots between steps in which no row leaves. The scripts use 2 to 16.
      alpha: Weight of the confidence in a row's score, in [0, 1]; the rest is that of its change.
      ratios: Proportions of the rows that run, in (0, 1], which never increase.
      depths: Relative depth from which on each proportion holds, in [0, 1), ascending from 0.
      compare: What has changed: the "hidden" output of the layer, or its "key", "value" or "query".
      evict: Sparse-dLLM's rule (`SparseDLLM`) for the pairs to attend to. None attends to all.
    """

    prompt_every: PositiveInt = 64
    block_every: TracedPositiveInt = 4
    alpha: Fraction = 0.5
    ratios: Annotated[tuple[Annotated[float, Gt(0), Le(1)], ...], MinLen(1)] = (1.0, 0.5, 0.25)
    depths: Annotated[tuple[Fraction, ...], MinLen(1)] = (0.0, 0.125, 0.25)
    compare: Literal["hidden", "key", "value", "query"] = "hidden"
    evict: Annotated[SparseDLLM | None, NoneMeans("nothing is evicted")] = None

    def __post_init__(self):
        super().__post_init__()
        es_dllm_rows.check_depths(self.ratios, self.depths)
        if self.evict is not None and self.evict.side != "both":
            raise ValueError(f"evict={self.evict!r} must have side='both', as the reference implementation.")

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        require_full_attention(spec, type(self).__name__, "leaves masks after the block as they are")
        layers = super().init(spec, layout, batch, dtype).layers
        shared = Skipping.zeros(self.compare, len(self._exits(spec)), spec, layout, batch, dtype)
        nothing = jnp.zeros((batch, layout.length), bool)
        if self.evict is not None:
            shared = shared._replace(retained=jnp.zeros((batch, spec.layers, layout.length), bool))
        if self._copies(layout):
            layers = WithCopies(layers.k, layers.v, KV.zeros(spec, batch, layout.length, dtype))
        return Cache(layers, shared, jnp.zeros((batch, spec.layers)), no_output=nothing)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return es_dllm_rows.entering(canvas, self._renews(canvas))

    def _renews(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether the coming step computes what precedes the block."""
        return canvas.first_step | (es_dllm_rows.slot(canvas) % self.prompt_every == 0)

    def _whole(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether no row leaves the coming step."""
        whole = self._renews(canvas) | (jnp.fmod(es_dllm_rows.slot(canvas), self.block_every) == 0)
        return whole if self.evict is None else whole | (canvas.block_step == self.evict.delay)[:, None]

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything, or after a step that evicts what some layer attends to."""
        if self.evict is None:
            return canvas.valid
        some = jnp.any(cache.shared.retained, axis=1)
        return canvas.valid & (some | (canvas.block_step <= self.evict.delay)[:, None])

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The block, and unless its first step renews everything before it, the block before."""
        block = layout.block
        return (block,) if block % self.prompt_every == 0 else (block, 2 * block)

    @property
    @override
    def _phases(self) -> tuple[str, ...]:
        return es_dllm_rows.NARROW, es_dllm_rows.EVERY

    @override
    def _phase(self, cache: Cache, canvas: Canvas) -> Int[Array, "b"]:
        many = es_dllm_rows.exceeds(self._ratios(canvas.spec).values(), self.select(cache, canvas), canvas)
        return (many | self._whole(canvas)[:, 0]).astype(jnp.int32)

    def _ratios(self, spec: ModelSpec) -> dict[int, float]:
        """The proportions by exit: before the layer where one falls, after it if its output is compared."""
        of = es_dllm_rows.proportions(self.ratios, self.depths, spec.layers)
        falls = [i for i in range(spec.layers) if of[i] != (of[i - 1] if i else 1)]
        return {i + (self.compare == "hidden"): of[i] for i in falls}

    @override
    def _exits(self, spec: ModelSpec) -> tuple[int, ...]:
        return tuple(self._ratios(spec))

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        """A row whose token was just decoded is not sure of anything any more."""
        decoded = canvas.predicting_positions(canvas.just_decoded)
        confidence = jnp.where(decoded, 0.0, cache.shared.confidence)
        shared = cache.shared._replace(confidence=confidence, entered=count_marked(rows.real))
        return cache._replace(shared=shared, no_output=jnp.zeros_like(canvas.valid))

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """The default layer, which attends to what it has retained."""
        if self.evict is None:
            return super().layer(layer, x, cache, rows, canvas)
        q, k = layer.qk(x, rows.positions)
        cache = cache.write(rows, k=k, v=layer.value(x))
        now, retained = cache.read(), cache.shared.retained
        evicts = canvas.active & (canvas.block_step == self.evict.delay)
        later = (canvas.block_step > self.evict.delay)[:, None]

        # The step that evicts attends to everything. Its rows, those of the block, score all other keys.
        block = canvas.predicting_positions(canvas.block)
        outside = canvas.valid & ~block
        score = max_pool(mean_query_score(q, now.k, rows.take(block) & rows.real), outside, self.evict.kernel)
        count = fraction_of(count_marked(outside), self.evict.keep, canvas.layout.length)
        new = block | best(jnp.where(outside, score, -jnp.inf), count)
        chosen = jnp.where(evicts[:, None], new, retained[:, layer.index])
        pairs = KV(now.k, now.v)
        if self._copies(canvas.layout):
            copied = (later & ~block)[..., None, None]
            cache = cache.replace(evicts, pairs, part="copies")
            pairs = jax.tree.map(lambda new, old: jnp.where(copied, old, new), pairs, now.copies)
        mask = canvas.attends(rows, canvas.valid & (chosen | ~later))
        o, _ = layer.attention(q, pairs.k, pairs.v, mask)
        shared = cache.shared._replace(retained=retained.at[:, layer.index].set(chosen))
        return layer.finish(x, o), cache._replace(shared=shared)

    def _copies(self, layout: Layout) -> bool:
        """Whether pairs are renewed after a block has retained them, which attends to them as they were."""
        return self.evict is not None and self.prompt_every % layout.block != 0

    @override
    def _exit(
        self, layer: Layer | None, x: Float[Array, "b q m"], cache: Cache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b w m"], Cache, Rows]:
        """The rows of the best scores go on; what they are compared with the next time is stored."""
        at, found = canvas.spec.layers if layer is None else int(layer.index), cache.shared
        ratio, number = self._ratios(canvas.spec)[at], self._exits(canvas.spec).index(at)
        new, old = es_dllm_rows.compared(self.compare, number, layer, x, cache, rows)
        score = es_dllm_rows.importance(new, old, found.confidence, rows, canvas, self.alpha)
        goes_on = best(score, es_dllm_rows.quota(ratio, found.entered, canvas)) | self._whole(canvas)
        stays = rows.real & goes_on
        cache = es_dllm_rows.let_go(
            cache._replace(shared=found.store(number, new, rows, stays)), rows, stays, at
        )
        x, rows = es_dllm_rows.going_on(x, rows, stays, es_dllm_rows.narrow_width(ratio, canvas.layout))
        return x, cache, rows

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """Stores how sure the rows of the last layer are; where more is computed, those of the block."""
        block = canvas.predicting_positions(canvas.block)
        assert cache.no_output is not None, "a cache of `init`"
        written = rows.mask() & ~cache.no_output & (block | ~self._renews(canvas))
        confidence = es_dllm_rows.remembered(cache.shared.confidence, proposal, written, canvas)
        return cache._replace(shared=cache.shared._replace(confidence=confidence))
