"""ES-dLLM's sets: the rows that enter a step, and those that go on to the next layers."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn import shift
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows, compact_rows
from dllm_jax.state.selection import best, fraction_of, leftmost
from pallas_kernels.counting import count_marked

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
        compare: str, exits: int, spec: ModelSpec, layout: Layout, batch: int, dtype: Any
    ) -> "Skipping":
        """Nothing remembered; stores for each exit if "hidden" outputs or queries are compared."""
        shape = {"hidden": (spec.width,), "query": (spec.heads, spec.head_dim)}.get(compare)
        places = batch, layout.response_inputs(spec.shifted)
        stored = () if shape is None else tuple(jnp.zeros((*places, *shape), dtype) for _ in range(exits))
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
    entered, found = count_marked(selected), jnp.zeros(len(selected), bool)
    for ratio in ratios:
        found |= quota(ratio, entered, canvas) > narrow_width(ratio, canvas.layout)
    return found


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
