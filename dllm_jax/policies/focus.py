"""FOCUS: masks that will not be decoded leave a step after its second layer (arXiv:2601.23278)."""

import dataclasses
from typing import Annotated, Any

import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.delayed_cache import DelayedCache
from dllm_jax.policies.parts.focus_masks import LAYERS, Focus, among_masks, candidate_masks, leaving
from dllm_jax.policies.parts.partial import run_narrowest
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, compact, gather
from dllm_jax.xla.loops import at_most_once

NARROW = "narrow"  # phase in which layers run fewer rows where enough have left


@dataclasses.dataclass(frozen=True)
class FOCUS(DelayedCache):
    """Lets most masks of a block leave a step after its second layer (FOCUS).

    Use it on block-causal models with experts at batch 1, where fewer tokens read fewer experts, or where
    the number of computed tokens limits a step.

    The first two layers run on all rows of `DelayedCache`. The masks whose importance grows most from the
    first layer to the second stay, about `alpha` times as many as a step has unmasked on average; so do their
    left neighbours, and masks left of them that never stayed. The other masks leave: later layers skip them,
    and the step does not unmask them. Decoded rows always stay.

    Memory: Dense keys and values for all positions.

    Limits: Needs a head that is not shifted, and no guidance, constraints, `early_commit` or `Edit`. On an
    H100, dense models save nothing up to about 300 rows (batch times block), as steps wait for weights.

    Equals exact decoding when: delayed=False and alpha is at least the block length.
    Differences: Unmasked tokens right of the last row that stays are read, which the reference leaves out.
      Final keys and values of a block are computed exactly. With `block` shorter than the model's block, only
      masks of the current sub-block leave.

    Attributes:
      alpha: Rows that stay per token that a step unmasks on average, at least 1.
      delayed: Whether settled rows are left out (`DelayedCache`); False computes the whole block.
    """

    alpha: Annotated[float, Ge(1)] = 1.5
    delayed: bool = True

    @property
    @override
    def _phases(self) -> tuple[str, ...]:
        return NARROW, "every"

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        cache, nothing = super().init(spec, layout, batch, dtype), jnp.zeros((batch, layout.length), bool)
        if spec.shifted:
            raise ValueError(
                f"FOCUS does not support shifted output heads ({spec.family}): a row that leaves predicts "
                "its neighbour. Use DelayedCache()."
            )
        importance = jnp.zeros((batch, LAYERS, layout.block))
        shared = Focus(importance, nothing, nothing, jnp.full((batch,), -1, jnp.int32))
        return Cache(cache.layers, shared, jnp.zeros((batch, spec.layers)), no_output=nothing)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        return super().select(cache, canvas) if self.delayed else canvas.everything

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        progress = jnp.where(canvas.block_begins[:, 0], -1, cache.shared.progress)
        shared = cache.shared._replace(stays=rows.mask(), read=canvas.valid, progress=progress)
        return cache._replace(shared=shared, no_output=jnp.zeros_like(canvas.valid))

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """The first two layers store keys and values of all rows; then the layer runs on those that stay."""
        survey = lambda trip, cache: self._survey(layer.in_trip(trip), x, cache, rows, canvas)
        cache = at_most_once(layer.index < LAYERS, survey, cache)

        def run(trip, where, some, carry):
            (x, cache), of_trip = carry, layer.in_trip(trip).at(some.index)
            part = where.take(x)
            q, k = of_trip.qk(part, some.positions)
            cache, now = cache.update(some, KV(k, of_trip.value(part)))
            mask = canvas.attends(some, cache.shared.read)
            o, _ = of_trip.attention(q, now.k, now.v, mask, canvas.lookahead(some))
            return where.put(x, of_trip.finish(part, o)), cache

        # In the width of the step or, where fewer rows take less time, half a block less.
        every, half, narrow = rows.index.shape[1], canvas.layout.block // 2, rows.phase == NARROW
        widths = (every - half, every) if narrow and 0 < half < every else (every,)
        stays = rows.take(cache.shared.stays) & rows.real
        return run_narrowest(stays, widths, rows, run, (x, cache), skips=narrow)

    @override
    def _dense_pairs(self, storage: Any) -> KV:
        return storage

    def _survey(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> LayerCache:
        """Stores keys and values of all rows, and what masks receive; in the last layer lets masks go."""
        q, k = layer.qk(x, rows.positions)
        cache = cache.write(rows, k=k, v=layer.value(x))
        index = compact(candidate_masks(canvas), canvas.layout.block)
        place = rows.slot(index)
        new = among_masks(gather(q, place), gather(k, place), index < rows.length)
        shared = cache.shared._replace(importance=cache.shared.importance.at[:, layer.index].set(new))

        # Of all layers one program: what the others make of it is not kept.
        last = layer.index == LAYERS - 1
        leaves = leaving(shared, canvas, self.alpha) & last
        return cache._replace(shared=shared.without(leaves, canvas, last), no_output=leaves)

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        """Counts the rows that left, in all layers but the first."""
        left = jnp.sum(rows.mask() & canvas.valid & ~cache.shared.stays, axis=1, keepdims=True)
        return cache._replace(extra_positions=-1.0 * left * (jnp.arange(canvas.spec.layers) >= LAYERS - 1))
