"""One layer over the computed positions, or over all of them from its stored inputs (Elastic-Cache)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.parts.control import when
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
    """What a layer gives, at the rows.

    Attributes:
      x: the residual stream.
      q: queries.
      lse: log sum exp of their attention scores.
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
    """One layer: sequences that are `wide` compute all positions, the others only the rows.

    The rows' new inputs are stored first; a wide sequence recomputes everything from the stored inputs and
    stores its outputs as the next layer's inputs. If any sequence is wide, all are computed in full, but the
    others keep only the results that they would have computed alone.
    """
    queried = rows.mask()
    (b, q, _), (h, d) = x.shape, (layer.spec.heads, layer.spec.head)
    begun = LayerResult(x, jnp.zeros((b, q, h, d), x.dtype), jnp.zeros((b, h, q)), cache.write(rows, x=x))

    def narrow(c: LayerResult) -> LayerResult:
        return _compute(layer, c.x, c.cache, rows, rows, canvas)

    def widened(c: LayerResult) -> LayerResult:
        # Everything is recomputed from the stored inputs; a narrow sequence keeps its rows alone.
        inputs, keep = c.cache.read().x, full_rows(queried | wide[:, None])
        x, q, lse, cache = _compute(layer, inputs, c.cache, full_rows(canvas.everything), keep, canvas)

        # Outputs are the next layer's inputs; gathered rows, so that the last layer's write is dropped.
        following = Rows(full_rows(canvas.everything & wide[:, None]).index, rows.length)
        cache = cache._replace(index=cache.index + 1).write(following, x=x)._replace(index=cache.index)
        lse = jnp.moveaxis(rows.take(jnp.moveaxis(lse, 2, 1)), 1, 2)
        return LayerResult(rows.take(x), rows.take(q), lse, cache)

    if rows.full:
        return widened(begun)
    any_wide = jnp.any(wide)
    return when(any_wide, widened, when(~any_wide, narrow, begun))


def _compute(
    layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, keep: Rows, canvas: Canvas
) -> LayerResult:
    """The layer at the rows; of their K/V only those of `keep` (a subset, in the same places) are stored."""
    q, k = layer.qk(x, rows.index)
    cache = cache.write(keep, k=k, v=layer.value(x))
    now = cache.read()
    o, lse = layer.attention(q, now.k, now.v, canvas.attends(rows))
    return LayerResult(layer.finish(x, o), q, lse, cache)
