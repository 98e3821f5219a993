"""FOCUS: masks that will not be decoded leave a step after its second layer (arXiv:2601.23278)."""

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Phase
from dllm_jax.policies.delayed_cache import DelayedCache
from dllm_jax.policies.parts.partial import run_narrowest
from dllm_jax.state.cache import KV, Cache, LayerCache, Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, compact, gather, places, spread
from dllm_jax.state.selection import best
from dllm_jax.xla.loops import at_most_once

NARROW = "narrow"  # phase in which layers run fewer rows where enough have left


@dataclasses.dataclass(frozen=True)
class FOCUS(DelayedCache):
    """Drops the less important masks of a block in the second layer (early exit) (FOCUS).

    It is predicted to pay on block-causal models with experts at batch 1, where fewer tokens read fewer
    experts, or where the number of computed tokens limits a step.

    The first layer runs on all rows of `DelayedCache`, and the second stores their keys and values. The masks
    whose importance grows most from the first layer to the second stay, about `alpha` times as many as a step
    has unmasked on average; so do their left neighbors, decoded rows, and masks left of a row that stays
    which never stayed before. The other masks leave: the rest of the second layer and later layers skip them,
    and the step does not unmask them.

    Memory: Dense keys and values for all positions.

    Limits: Needs a block-causal model whose head is not shifted, and no guidance, constraints,
    `early_commit`, `Edit`, `Autoregressive`, `FreeDave` or `S2D2`. By the roofline, dense models save nothing
    on an H100 up to about 300 rows (batch times block), as steps wait for weights.

    Equals exact decoding when: delayed=False and alpha is at least the block length.
    Differences: Unmasked tokens right of the last row that stays are read, which the reference leaves out.
      Final keys and values of a block are computed exactly. With `block` shorter than the model's block, only
      masks of the current sub-block leave.

    Attributes:
      alpha: Rows that stay per token that a step unmasks on average, at least 1.
      delayed: Whether reusable rows are left out (`DelayedCache`); False computes the whole block.
    """

    alpha: Annotated[float, Ge(1)] = 1.5
    delayed: bool = True

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        return Phase(NARROW), Phase("every")

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        cache, nothing = super().init(spec, layout, batch, dtype), jnp.zeros((batch, layout.length), bool)
        if spec.shifted:
            raise ValueError(
                f"FOCUS does not support shifted output heads ({spec.family}): a row that leaves predicts "
                "its neighbor. Use DelayedCache()."
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

        def run(trip, where, here, carry):
            (x, cache), of_trip = carry, layer.in_trip(trip).at(here.index)
            part = where.take(x)
            q, k = of_trip.qk(part, here.positions)
            cache, now = cache.update(here, KV(k, of_trip.value(part)))
            mask = canvas.attends(here, cache.shared.read)
            o, _ = of_trip.attention(q, now.k, now.v, mask, canvas.lookahead(here))
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


# -- the masks that leave a step -------------------------------------------------------------------


LAYERS = 2  # whose importance is compared: rows leave in the last of them


class Focus(NamedTuple):
    """State that layers and steps share.

    Attributes:
      importance: Attention that the block's masks receive from each other, in the first two layers.
      stays: Rows of the step that no layer has let go.
      read: Positions that the layers read from the second one on.
      progress: Rightmost position of the block that ever stayed; -1 before its first step.
    """

    importance: Float[Array, "b 2 w"]
    stays: Bool[Array, "b l"]
    read: Bool[Array, "b l"]
    progress: Int[Array, "b"]

    def without(self, leaves: Bool[Array, "b l"], canvas: Canvas, last: Bool[Array, ""] | bool) -> "Focus":
        """The state after these masks have left; before the `last` layer of `LAYERS` none does."""
        stays = self.stays & ~leaves
        end = jnp.max(jnp.where(stays & canvas.block, canvas.position, -1), axis=1)
        read = canvas.valid & ~(leaves & (canvas.position > end[:, None]))
        progress = jnp.where(last, jnp.maximum(self.progress, end), self.progress)
        return self._replace(stays=stays, read=read, progress=progress)


def candidate_masks(canvas: Canvas) -> Bool[Array, "b l"]:
    """The masks of the block that may be unmasked: these may leave."""
    return canvas.eligible & canvas.block


def target(canvas: Canvas, alpha: float) -> Int[Array, "b"]:
    """Number of masks that should stay: `alpha` times the tokens that each step of the block unmasked."""
    # A table, as the product is rounded up: devices have no doubles. After more steps the mean is below 1.
    most, count = canvas.layout.block, jnp.sum(candidate_masks(canvas), axis=1)
    mean = lambda decoded, steps: decoded / steps if steps else 1.0
    table = [[wanted(alpha, mean(d, s)) for d in range(most + 1)] for s in range(most + 1)]
    decoded = canvas.block_masks - jnp.sum(canvas.masked & canvas.block, axis=1)
    at_most = jnp.asarray(table, jnp.int32)[jnp.minimum(canvas.block_step, most), decoded]
    return jnp.minimum(count, at_most)


def wanted(alpha: float, mean: float) -> int:
    """Number of masks that should stay where a step unmasks `mean` tokens on average."""
    return math.ceil(alpha * max(mean, 1.0))


def leaving(focus: Focus, canvas: Canvas, alpha: float) -> Bool[Array, "b l"]:
    """The masks that leave the step."""
    masks, most = candidate_masks(canvas), target(canvas, alpha)[:, None]
    index = compact(masks, canvas.layout.block)
    real = index < canvas.layout.length
    count = jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1)

    # Those whose importance grows by a deviation more than the mean; the best ones if these are too few.
    delta = jnp.where(real, focus.importance[:, 1] - focus.importance[:, 0], 0.0)
    mean = jnp.sum(delta, axis=1, keepdims=True) / count
    variance = jnp.sum(jnp.where(real, (delta - mean) ** 2, 0.0), axis=1, keepdims=True) / count
    outliers = real & (delta >= mean + jnp.sqrt(variance))
    largest = best(jnp.where(real, delta, -jnp.inf), most[:, 0])
    enough = jnp.sum(outliers, axis=1, keepdims=True) >= most
    chosen = jnp.where(enough, outliers, largest) | (count <= most)
    chosen = spread(chosen & real, places(index, canvas.layout.length), False)

    # Their left neighbors, and masks left of all that stays that never did: so all that is read was computed.
    stays = chosen | (masks & jnp.pad(chosen[:, 1:], ((0, 0), (0, 1))))
    stay_anyway = focus.stays & canvas.block & ~masks  # tokens, and what follows a stop
    rightmost = jnp.max(jnp.where(stays | stay_anyway, canvas.position, -1), axis=1, keepdims=True)
    new = (canvas.position > focus.progress[:, None]) & (canvas.position < rightmost)
    return masks & ~stays & ~new


def among_masks(
    q: Float[Array, "b w h d"], k: Float[Array, "b w k d"], real: Bool[Array, "b w"]
) -> Float[Array, "b w"]:
    """Attention that each mask receives from the masks, max-pooled over three neighbors among them.

    Args:
      q: rotated queries of the masks.
      k: rotated keys of the masks.
      real: Entries that are masks, not padding.
    """
    b, w, heads, head = q.shape
    grouped = q.reshape(b, w, k.shape[2], heads // k.shape[2], head)
    score = einsum("bqkgd,bskd->bkgqs", grouped, k, jnp.float32) / math.sqrt(head)
    score = jnp.where(real[:, None, None, None], score, -jnp.inf)
    pooled = jax.lax.reduce_window(score, -jnp.inf, jax.lax.max, (1, 1, 1, 1, 3), (1,) * 5, "SAME")
    pooled = jnp.where(real[:, None, None, None], pooled, -jnp.inf)

    # Without any mask the weights would be NaN.
    weights = jax.nn.softmax(
        jnp.where(jnp.any(real, axis=1)[:, None, None, None, None], pooled, 0.0), axis=-1
    )
    weights = jnp.where(real[:, None, None, :, None], weights, 0.0)
    return jnp.sum(weights, axis=(1, 2, 3))
