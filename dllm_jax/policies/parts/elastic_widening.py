"""One layer over the computed positions, or over all of them from its stored inputs (Elastic-Cache)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.cache import KV, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows, full_rows


class InputStore(NamedTuple):
    """Storage from which a layer can be recomputed: its input and its K/V, for all positions."""

    x: Float[Array, "*n b l m"]
    k: Float[Array, "*n b l k d"]
    v: Float[Array, "*n b l k d"]

    @staticmethod
    def zeros(spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> "InputStore":
        """Empty storage of all layers."""
        x = jnp.zeros((spec.layers, batch, layout.length, spec.width), dtype)
        return InputStore(x, *KV.zeros(spec, batch, layout.length, dtype))


class LayerResult(NamedTuple):
    """Result of a layer at the computed positions.

    Attributes:
      x: the residual stream after the layer.
      q: rotated queries.
      lse: log-sum-exp of their attention scores.
      cache: the changed storage.
    """

    x: Float[Array, "b q m"]
    q: Float[Array, "b q h d"]
    lse: Float[Array, "b h q"]
    cache: LayerCache


def pass_layer(
    layer: Layer,
    x: Float[Array, "b q m"],
    cache: LayerCache,
    rows: Rows,
    wide: Bool[Array, "b"],
    canvas: Canvas,
) -> LayerResult:
    """One layer over the selected positions; in a full step, wide sequences compute all positions.

    New inputs are stored first.

    Args:
      layer: this layer's weights.
      x: the residual stream at the rows.
      cache: this layer's view of an `InputStore`.
      rows: the selected positions.
      wide: sequences that compute all positions, in a full step.
      canvas: state before the step.
    """
    cache = cache.write(rows, x=x)
    if rows.full:
        return compute_all(layer, cache, rows, rows.mask() | wide[:, None], wide, canvas)
    return _compute(layer, x, cache, rows, rows, canvas)


def compute_all(
    layer: Layer,
    cache: LayerCache,
    rows: Rows,
    keep: Bool[Array, "b l"],
    wide: Bool[Array, "b"],
    canvas: Canvas,
) -> LayerResult:
    """One layer over all positions from its stored inputs (algorithm 1), with the result at the rows.

    Args:
      layer: this layer's weights.
      cache: this layer's view of an `InputStore`.
      rows: the selected positions.
      keep: Positions whose keys and values are stored.
      wide: Sequences whose outputs become the next layer's inputs.
      canvas: state before the step.
    """
    every = full_rows(canvas.everything)
    x, q, lse, cache = _compute(layer, cache.read().x, cache, every, full_rows(keep), canvas)
    cache = cache.write(full_rows(canvas.everything & wide[:, None]), ahead=1, x=x)

    # Only the selected positions go on to the next layer's test and votes.
    lse = jnp.moveaxis(rows.take(jnp.moveaxis(lse, 2, 1)), 1, 2)
    return LayerResult(rows.take(x), rows.take(q), lse, cache)


def _compute(
    layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, keep: Rows, canvas: Canvas
) -> LayerResult:
    """The exact layer at the rows; only the K/V of `keep`, a subset in the same places, are stored."""
    layer = layer.at(rows.index)
    q, k = layer.qk(x, rows.positions)
    cache = cache.write(keep, k=k, v=layer.value(x))
    now = cache.read()
    o, lse = layer.attention(q, now.k, now.v, cache.attends(rows, canvas), reads_lse=True)
    return LayerResult(layer.finish(x, o), q, lse, cache)
