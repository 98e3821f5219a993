"""ES-dLLM: rows that will not be decoded leave a step in early layers (arXiv:2603.10088)."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Gt, Le, MinLen
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn import shift
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Fraction, NoneMeans, PositiveInt, TracedPositiveInt, refuse
from dllm_jax.policies.base import Layers, Phase, Policy, as_kind
from dllm_jax.policies.sparse_dllm import SparseDLLM
from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, compact_rows, scatter
from dllm_jax.state.selection import best, fraction_of, leftmost, max_pool, mean_query_score
from pallas_kernels.counting import count_marked


class WithCopies(NamedTuple):
    """Keys and values, and what they were when a block retained some of them."""

    k: Float[Array, "*n b l k d"]
    v: Float[Array, "*n b l k d"]
    copies: KV


@dataclasses.dataclass(frozen=True)
class ESDLLM(Policy):
    """Skips later layers (early exit) for tokens of low confidence and little change in the block (ES-dLLM).

    Early exit is predicted to pay where the number of computed tokens limits a step: on an H100 beyond about
    300 rows (batch times block).

    As `DualCache`, with the positions before the block renewed at intervals, and masks after it computed in
    the first step alone. At a few depths each row is scored by its confidence in earlier steps, and by how
    much it has changed since it last went on there. The best rows go on; the others keep their KV pairs in
    later layers, and the step does not unmask their tokens. In every `block_every`-th slot, all rows of the
    block run all layers. A block has as many slots as positions, and a step takes one; slots that are left
    are skipped.

    With `evict` the step after the first `evict.delay` of a block is whole. Each layer then retains the pairs
    outside of the block that Sparse-dLLM would, and the block's later steps attend to them.

    Memory: Dense keys and values for all positions; with compare="hidden" or "query" also the rows at each
      depth where `ratios` fall, of the response and the positions that predict it. Evicted pairs stay there,
      as in the reference, twice unless `prompt_every` is a multiple of the block.

    Limits: Needs an integer block, and no guidance, constraints, `early_commit`, `Edit`, `WINO`, `FreeDave`,
      `DAEDAL` or `DreamOn`. By the roofline, early exit saves nothing in short blocks on GPUs at batch 1.

    Equals exact decoding when: prompt_every=1, evict=None in one block, if the output head is not shifted; on
      DiffusionGemma block_every=1.
    Differences: Slots, quotas and what was just decoded are counted per sequence, so a batch changes nothing.
      Scores are float32, stored rows of the model's dtype, and ties go to the lower position. Without a mask
      token (DiffusionGemma) uncertainty, 1 - exp(-entropy), takes the place of confidence: no row is about to
      be unmasked. `block_every` counts from each canvas's first denoising step, and `prompt_every` has no
      effect.

    Attributes:
      prompt_every: Slots between steps that renew everything before the block. The scripts use 8 to 256.
      block_every: Slots between steps in which no row leaves. The scripts use 2 to 16.
      alpha: Weight of the confidence in a row's score, in [0, 1]; the rest is that of its change.
      ratios: Proportions of the rows that run, in (0, 1], which never increase.
      depths: Relative depth from which on each proportion holds, in [0, 1], ascending from 0.
      compare: What has changed: the "hidden" output of the layer, or its "key", "value" or "query".
      evict: Sparse-dLLM's rule (`SparseDLLM`) for the pairs to attend to. None, which
        DiffusionGemma needs, attends to all.
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
        check_depths(self.ratios, self.depths)
        if self.evict is None:
            return
        if type(self.evict) is not SparseDLLM:
            raise ValueError(f"evict={self.evict!r} must be a SparseDLLM itself: no method of it is called.")
        if self.evict.side != "both":
            raise ValueError(f"evict={self.evict!r} must have side='both', as the reference implementation.")

    @override
    def _in_blocks(self, spec: ModelSpec) -> Policy:
        if spec.has_mask_token:
            return self
        refuse(self, {"evict": "no step computes both the context and a canvas"}, by=f"by {spec.family}")
        return as_kind(self, InCanvas)

    def _check_model(self, spec: ModelSpec):
        """Raises ValueError for models whose steps compute nothing after the block."""
        require_full_attention(spec, type(self).__name__, "leaves masks after the block as they are")

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        self._check_model(spec)
        layers = super().init(spec, layout, batch, dtype).layers
        shared = Skipping.zeros(self.compare, self._exits(spec), spec, layout, batch, dtype)
        nothing = jnp.zeros((batch, layout.length), bool)
        if self.evict is not None:
            shared = shared._replace(retained=jnp.zeros((batch, spec.layers, layout.length), bool))
        if self._copies(layout):
            layers = WithCopies(layers.k, layers.v, KV.zeros(spec, batch, layout.length, dtype))
        return Cache(layers, shared, jnp.zeros((batch, spec.layers)), no_output=nothing)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return entering(canvas, self._renews(canvas))

    def _renews(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether the coming step computes what precedes the block."""
        return canvas.first_step | (slot(canvas) % self.prompt_every == 0)

    def _whole(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether no row leaves the coming step."""
        whole = self._renews(canvas) | (jnp.fmod(slot(canvas), self.block_every) == 0)
        return whole if self.evict is None else whole | (canvas.block_step == self.evict.delay)[:, None]

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything, or after a step that evicts what some layer attends to."""
        if self.evict is None:
            return canvas.valid
        retained = jnp.any(cache.shared.retained, axis=1)
        return canvas.valid & (retained | (canvas.block_step <= self.evict.delay)[:, None])

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The block, and unless its first step renews everything before it, the block before."""
        block = layout.block
        return (block,) if block % self.prompt_every == 0 else (block, 2 * block)

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        return Phase(NARROW), Phase(EVERY, needed=self._runs_every)

    def _runs_every(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b"]:
        """Sequences of which more rows go on than a narrow step holds."""
        many = exceeds(self._ratios(canvas.spec).values(), self.select(cache, canvas), canvas)
        return many | self._whole(canvas)[:, 0]

    def _ratios(self, spec: ModelSpec) -> dict[int, float]:
        """The proportions by exit: before the layer where one falls, after it if its output is compared."""
        of = proportions(self.ratios, self.depths, spec.layers)
        falls = [i for i in range(spec.layers) if of[i] != (of[i - 1] if i else 1)]
        return {i + (self.compare == "hidden"): of[i] for i in falls}

    def _exits(self, spec: ModelSpec) -> tuple[int, ...]:
        """Layers before which rows may leave a step, ascending; `spec.layers` is the end."""
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
    def network(
        self, layers: Layers, x: Float[Array, "b q m"], cache: Cache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], Cache]:
        """Runs the layers in parts, between which rows leave."""
        spec, running, begins = canvas.spec, rows, 0
        for end in self._exits(spec):
            x, cache = layers.run(x, cache, running, range(begins, end))
            layer = layers.at(end) if end < spec.layers else None
            x, cache, running = self._exit(layer, x, cache, running, canvas)
            begins = end
        x, cache = layers.run(x, cache, running, range(begins, spec.layers))
        if running.index.shape != rows.index.shape:
            zeros = jnp.zeros((*rows.index.shape, x.shape[2]), x.dtype)
            x = scatter(zeros, rows.slot(running.index), x)
        return x, cache

    def _exit(
        self, layer: Layer | None, x: Float[Array, "b q m"], cache: Cache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b w m"], Cache, Rows]:
        """The rows of the best scores go on; what they are compared with the next time is stored.

        Args:
          layer: Layer that runs next; None at the end.
          x: Residual stream at the rows.
          cache: The cache, whose `no_output` gains the positions that leave.
          rows: Rows that have not left.
          canvas: State before the step.

        Returns:
          the stream and the rows that later layers run, of the same width or a smaller one, and the cache.
        """
        at, shared = canvas.spec.layers if layer is None else int(layer.index), cache.shared
        ratio, number = self._ratios(canvas.spec)[at], self._exits(canvas.spec).index(at)
        new, old = compared(self.compare, number, layer, x, cache, rows)
        score = importance(new, old, shared.confidence, rows, canvas, self.alpha)
        goes_on = best(score, quota(ratio, shared.entered, canvas)) | self._whole(canvas)
        stays = rows.real & goes_on
        cache = let_go(cache._replace(shared=shared.store(number, new, rows, stays)), rows, stays, at)
        x, rows = going_on(x, rows, stays, narrow_width(ratio, canvas.layout))
        return x, cache, rows

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """Stores how sure the rows of the last layer are; in steps that renew all before it, the block's."""
        block = canvas.predicting_positions(canvas.block)
        assert cache.no_output is not None, "a cache of `init`"
        written = rows.mask() & ~cache.no_output & (block | ~self._renews(canvas))
        confidence = remembered(cache.shared.confidence, proposal, written, canvas)
        return cache._replace(shared=cache.shared._replace(confidence=confidence))


@dataclasses.dataclass(frozen=True)
class InCanvas(ESDLLM):
    """ES-dLLM in the canvas of a model without a mask token, whose context is stored causally."""

    @override
    def _check_model(self, spec: ModelSpec):
        """Does nothing: the model denoises canvases."""

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """The canvas."""
        return canvas.block

    @override
    def _renews(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        return canvas.causal

    @override
    def _whole(self, canvas: Canvas) -> Bool[Array, "b 1"]:
        due = jnp.fmod(canvas.block_step - 1, self.block_every) == 0
        return canvas.causal | due[:, None]

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        return ()  # a canvas, which the engine adds

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        # Scores are entropies, below zero.
        known = proposal.score > -jnp.inf
        uncertain = jnp.where(known, -jnp.expm1(proposal.score), proposal.score)
        return super().observe(cache, canvas, rows, proposal._replace(score=uncertain))


# -- scores and sets of rows -----------------------------------------------------------------------


NARROW, EVERY = "narrow", "every"  # phases: rows that go on run in a width of their own, or in the step's


class Skipping(NamedTuple):
    """State that layers and steps share.

    Attributes:
      confidence: Confidence of each row in the token that it predicts, when it last ran all layers.
      entered: Number of rows that entered the step.
      stored: What rows are compared with at each exit, at the last t positions; () where that is among the
        stored pairs.
      retained: Positions that each layer has retained for the block's later steps; () unless it evicts.
    """

    confidence: Float[Array, "b l"]
    entered: Int[Array, "b"]
    stored: tuple[Float[Array, "b t *d"], ...]
    retained: Bool[Array, "b n l"] | tuple[()] = ()

    @staticmethod
    def zeros(
        compare: str, exits: tuple[int, ...], spec: ModelSpec, layout: Layout, batch: int, dtype: Any
    ) -> "Skipping":
        """Nothing remembered; stores for each exit if "hidden" outputs or queries are compared."""
        shape = lambda at: (spec.width,) if compare == "hidden" else (at.heads, at.head_dim)
        places = batch, layout.response_inputs(spec.shifted)
        stores = exits if compare in ("hidden", "query") else ()
        stored = tuple(jnp.zeros((*places, *shape(spec.at(exit))), dtype) for exit in stores)
        return Skipping(jnp.zeros((batch, layout.length)), jnp.zeros(batch, jnp.int32), stored)

    def slots(self, rows: Rows) -> Rows:
        """Returns the rows as slots of a store of the last positions."""
        return rows.last(self.stored[0].shape[1])

    def store(
        self, number: int, new: Float[Array, "b q *d"], rows: Rows, stays: Bool[Array, "b q"]
    ) -> "Skipping":
        """Returns the state in which what the rows that go on are is stored, for their next comparison."""
        if not self.stored:
            return self
        store = self.stored[number]
        store = self.slots(rows).where(stays).put(store, new.astype(store.dtype))
        return self._replace(stored=(*self.stored[:number], store, *self.stored[number + 1 :]))


def check_depths(ratios: tuple[float, ...], depths: tuple[float, ...]):
    """Raises ValueError for proportions that increase, or that do not have a depth each, from 0 up."""
    if len(depths) != len(ratios):
        raise ValueError(f"depths={depths} must have {len(ratios)} entries: one for each of ratios={ratios}.")
    if depths[0] != 0 or any(a >= b for a, b in itertools.pairwise(depths)):
        raise ValueError(f"depths={depths} must ascend from 0: each proportion holds from its depth on.")
    if any(a < b for a, b in itertools.pairwise(ratios)):
        raise ValueError(f"ratios={ratios} must not increase: rows that left a step do not come back.")


def proportions(ratios: tuple[float, ...], depths: tuple[float, ...], layers: int) -> tuple[float, ...]:
    """Returns the proportion of each layer: the last one whose relative depth the layer has reached."""
    of = lambda layer: max(i for i, depth in enumerate(depths) if layer >= depth * layers)
    return tuple(ratios[of(layer)] for layer in range(layers))


# -- rows that enter -----------------------------------------------------------------------------------------


def slot(canvas: Canvas) -> Int[Array, "b 1"]:
    """Returns the slot of the coming step: each block has as many as positions, however many it takes."""
    return (canvas.block_start - canvas.first_block + canvas.block_step)[:, None]


def entering(canvas: Canvas, renews: Bool[Array, "b 1"]) -> Bool[Array, "b l"]:
    """Selects the block, in its first step from the leftmost row on that has just decoded.

    Args:
      canvas: State before the step.
      renews: Sequences that compute everything in front of the block too, and the text after the answer; in
        the first step, everything.
    """
    block = canvas.predicting_positions(canvas.block)
    decoded = canvas.predicting_positions(canvas.just_decoded) & canvas.block_begins
    end = jnp.max(jnp.where(block, canvas.position, -1), axis=1, keepdims=True)
    first = jnp.min(jnp.where(block | decoded, canvas.position, end), axis=1, keepdims=True)
    between = (canvas.position >= jnp.where(renews, 0, first)) & (canvas.position <= end)
    suffix = renews & (canvas.position >= canvas.layout.end)
    return canvas.first_step | between | suffix


# -- rows that leave -----------------------------------------------------------------------------------------


def quota(ratio: float, entered: Int[Array, "b"], canvas: Canvas) -> Int[Array, "b"]:
    """Returns how many rows go on: the proportion, but more than the last step decoded."""
    least = jnp.minimum(count_marked(canvas.just_decoded) + 2, canvas.layout.block)
    return jnp.maximum(fraction_of(entered, ratio, canvas.layout.length), least)


def narrow_width(ratio: float, layout: Layout) -> int:
    """Returns how many rows of a block go on after a step that decodes one token."""
    return max(int(ratio * layout.block), min(3, layout.block))


def exceeds(ratios: Iterable[float], selected: Bool[Array, "b l"], canvas: Canvas) -> Bool[Array, "b"]:
    """Marks sequences of which more rows go on at some exit than the narrow phase runs."""
    entered, exceeding = count_marked(selected), jnp.zeros(len(selected), bool)
    for ratio in ratios:
        exceeding |= quota(ratio, entered, canvas) > narrow_width(ratio, canvas.layout)
    return exceeding


def compared(
    compare: str, number: int, layer: Layer | None, x: Float[Array, "b q m"], cache: Cache, rows: Rows
) -> tuple[Float[Array, "b q *d"], Float[Array, "b q *d"]]:
    """Returns what the rows are at an exit, and what they were when they last went on from it.

    Args:
      compare: "hidden", "query", "key" or "value".
      number: Index of the exit.
      layer: Layer after the exit; None at the end.
      x: Residual stream at the rows.
      cache: The cache, which holds stored pairs, and `Skipping`.
      rows: Rows that have not left.
    """
    if compare == "hidden" or layer is None:
        return x, cache.shared.slots(rows).take(cache.shared.stored[number])
    layer = layer.at(rows.index)
    q, k = layer.qk(x, rows.positions)
    if compare == "query":
        return q, cache.shared.slots(rows).take(cache.shared.stored[number])
    pairs = LayerCache.of(cache, layer.index, layer.kernels).read()
    return (k, rows.take(pairs.k)) if compare == "key" else (layer.value(x), rows.take(pairs.v))


def let_go(cache: Cache, rows: Rows, stays: Bool[Array, "b q"], first: int) -> Cache:
    """Returns the cache after rows have left: no output, and fewer positions from layer `first` on."""
    extra, no_output = cache.extra_positions, cache.no_output
    assert extra is not None, "a cache of `init`"
    assert no_output is not None, "a cache of `init`"
    left, layers = rows.real & ~stays, extra.shape[1]
    fewer = count_marked(left)[:, None] * (jnp.arange(layers) >= first)
    return cache._replace(extra_positions=extra - fewer, no_output=no_output | rows.where(left).mask())


def variation(new: Float[Array, "b q *d"], old: Float[Array, "b q *d"], rows: Rows) -> Float[Array, "b q"]:
    """Returns the mean absolute change of each row over the root mean square of what it was.

    float32; divided by the largest change of a sequence's rows if that exceeds 1.
    """
    new, old = (a.reshape(*a.shape[:2], -1).astype(jnp.float32) for a in (new, old))
    size = jnp.sqrt(jnp.mean(old * old, axis=-1))
    change = jnp.where(rows.real, jnp.mean(jnp.abs(new - old), axis=-1) / (size + 1e-6), 0.0)
    return change / jnp.maximum(jnp.max(change, axis=1, keepdims=True), 1.0)


def importance(
    new: Float[Array, "b q *d"],
    old: Float[Array, "b q *d"],
    confidence: Float[Array, "b l"],
    rows: Rows,
    canvas: Canvas,
    alpha: float,
) -> Float[Array, "b q"]:
    """Returns the score by which rows go on, -inf at padding.

    It is alpha times their remembered confidence and (1 - alpha) times their change, and more for some.
    """
    remembered = rows.take(confidence)
    score = alpha * remembered + (1 - alpha) * variation(new, old, rows)

    # The two surest rows, that of the leftmost mask, and those that have just decoded come before all others.
    if alpha > 0:
        surest = best(jnp.where(rows.real, remembered, -jnp.inf), 2)
        score += 2.0 * surest
    first = leftmost(canvas.masked & canvas.block, 1)
    score += 5.0 * rows.take(canvas.predicting_positions(first))
    if alpha < 1:
        score += 3.0 * rows.take(canvas.predicting_positions(canvas.just_decoded))
    return jnp.where(rows.real, score, -jnp.inf)


def going_on(
    x: Float[Array, "b q m"], rows: Rows, stays: Bool[Array, "b q"], width: int
) -> tuple[Float[Array, "b w m"], Rows]:
    """Returns the stream and the rows without those that leave, in a narrower width if there is one."""
    if rows.phase != NARROW or width >= rows.index.shape[1]:
        return x, rows.where(stays)
    places = compact_rows(stays, width)
    return places.take(x), dataclasses.replace(rows.at(places), phase=rows.phase)


def remembered(
    confidence: Float[Array, "b l"], proposal: Proposal, written: Bool[Array, "b l"], canvas: Canvas
) -> Float[Array, "b l"]:
    """Returns the confidence of each row after a step: where written, that in its candidate, or 0."""
    score = jnp.where(proposal.score > -jnp.inf, proposal.score, 0.0)
    if proposal.delayed is not None and not canvas.spec.shifted:  # as in both reference implementations
        score = jnp.where(proposal.delayed, 0.0, score)
    return jnp.where(written, shift.by_predictor(score, canvas.spec), confidence)
