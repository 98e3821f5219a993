"""Partial updates inside a layer: which of its positions change, and in what static width they run."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.nn.layer import LayerIndex
from dllm_jax.state import selection
from dllm_jax.state.rows import Rows, compact_rows, full_rows
from dllm_jax.xla.loops import REFRESH, UPDATE, at_most_once
from dllm_jax.xla.reductions import count_marked

Carry = TypeVar("Carry")


def least_similar(
    similarity: Float[Array, "b q"],
    among: Bool[Array, "b q"],
    ratio: float | tuple[float, ...],
    layer: LayerIndex = 0,
    size: int | None = None,
) -> Bool[Array, "b q"]:
    """The int(count * ratio) least similar of a sequence's `count` marked positions, ties to the lower one.

    Args:
      similarity: Similarity of the new values to the cached ones.
      among: marked positions.
      ratio: fraction of them to update; one for each layer, or for all.
      layer: Index of the layer.
      size: Number of marked positions of each sequence that has any; None where padding leaves fewer.
    """
    # Of the sequence's own positions: padding must not count, or batch mates would change the result.
    sizes = count_marked(among) if size is None else jnp.full(len(among), size)
    counts = selection.fraction_of(sizes, ratio, similarity.shape[1])
    count = counts[layer] if isinstance(ratio, tuple) else counts
    return selection.best(jnp.where(among, -similarity, -jnp.inf), count)


def run_narrowest(
    marked: Bool[Array, "b q"],
    widths: tuple[int, ...],
    rows: Rows,
    body: Callable,
    carry: Carry,
    skips: bool = True,
) -> Carry:
    """Runs `body(trip, places, some, carry)` once over the marked positions, in the narrowest fitting width.

    In the width of the rows it runs in place, without gathering or scattering. If no position is marked,
    nothing runs, unless that is the only width, and the step is a full one or does not skip.

    Args:
      marked: entries of `rows` to run.
      widths: static widths, ascending; the last must hold all entries.
      rows: the computed positions.
      body: takes the trip of `xla.loops.at_most_once` (None without a loop), the marked entries as rows of
        `rows`, the positions there, and the carry.
      carry: the state that `body` returns changed.
      skips: Whether a partial step's only width is a loop, which nothing runs if nothing is marked.
    """
    entries = marked.shape[1]
    in_place = full_rows(marked), rows.where(marked)
    if (rows.full or not skips) and widths == (entries,):
        return body(None, *in_place, carry)

    needed, narrower = jnp.max(count_marked(marked)), jnp.int32(0)

    def narrowed(width: int) -> tuple[Rows, Rows]:
        places = compact_rows(marked, width)
        return places, rows.at(places)

    for width in widths:
        where = in_place if width == entries else narrowed(width)
        fits = (needed > narrower) & (needed <= width)
        name = REFRESH if len(widths) > 1 and width == widths[-1] else f"{UPDATE}{width}"
        run = lambda trip, carry, where=where: body(trip, *where, carry)
        carry = at_most_once(fits, run, carry, name)
        narrower = jnp.int32(width)
    return carry


def gaussian_ratios(
    layers: int, ratio: float, start: float, end: float, peak: float, least: float
) -> tuple[float, ...]:
    """Shares of updates by layer: a Gaussian over the relative depth, with a width of its own on each side.

    On the left ratio exp(-(t - peak)^2 / 2 sigma^2), sigma such that it is `start` at t = 0; on the right
    `end` at t = 1 (SPA-Cache, arXiv:2602.02544).

    Args:
      layers: Number of layers of the model.
      ratio: share at the peak.
      start: Share at the first layer.
      end: Share after the last layer.
      peak: relative depth t of the largest share.
      least: Minimum share of any layer.
    """
    # As a power: ratio (start / ratio)^x^2, x from 1 at the start to 0 at the peak, and so on the right.
    shares = []
    for depth in (layer / layers for layer in range(layers)):
        side, whole = (start, peak) if depth < peak else (end, 1 - peak)
        x = abs(depth - peak) / whole if whole else 0.0
        shares.append(max(ratio * (side / ratio) ** (x * x) if ratio else 0.0, least))
    return tuple(shares)
