"""SPA-Cache: dLLM-Cache with shares of updates by layer, found by low-rank proxies (arXiv:2602.02544)."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.arithmetic import cosine, einsum
from dllm_jax.nn.layer import Layer, walk
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import rope_of
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Arrays, Fraction, NoneMeans, PositiveInt, TracedPositiveInt, check_argument
from dllm_jax.policies.dllm_cache import DLLMCache, after_reading
from dllm_jax.policies.parts.partial import gaussian_ratios, least_similar
from dllm_jax.state.cache import Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows

# With the singular value decomposition W = V S U^T of the value projection, S_r V_r^T x is the value of x,
# without its bias, in the first r columns of U. Of all directions it has the values' own cosines.


class ValueProxy(Arrays):
    """A model's directions: made once, it serves all requests as an argument of their programs.

    Attributes:
      directions: float32, the first r right singular vectors of each layer's value projection.
    """

    leaves = ("directions",)
    directions: Float[Array, "n k d r"]

    def __init__(self, directions: Any):
        self.directions = jnp.asarray(directions, jnp.float32)
        if self.directions.ndim != 4:
            shape = self.directions.shape
            raise ValueError(f"directions has shape {shape}; expected [n, k, d, r]: use ValueProxy.of")

    @classmethod
    def of(cls, model: Model, rank: int) -> "ValueProxy":
        """The directions of a model: an eigendecomposition of k d x k d numbers for each layer.

        Args:
          model: Model whose current weights are decomposed.
          rank: Number of directions. The published settings are 128 (LLaDA-8B) and 32 (Dream-7B).

        Raises:
          ValueError: no positive rank, or more than a layer has; or layers have values of two widths.
        """
        if model.spec.gemma is not None:
            raise ValueError(
                f"ValueProxy does not support {model.spec.family}: its layers have values of two widths. Use "
                "SPACache(proxy=None)."
            )
        rank, most = check_argument("rank", rank, PositiveInt), model.spec.kv_heads * model.spec.head_dim
        if rank > most:
            raise ValueError(f"rank={rank} must be at most the width of the values, {most}")
        return cls._around(_directions(model, rank))

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.directions.shape[-1]

    def check(self, spec: ModelSpec):
        """Raises ValueError unless it has the model's number of layers, heads and head width."""
        if self.directions.shape[:3] != (wanted := (spec.layers, spec.kv_heads, spec.head_dim)):
            raise ValueError(
                f"proxy is of a model with {self.directions.shape[:3]} layers, heads and head width, not of "
                f"{spec.family} with {wanted}"
            )

    def __call__(self, layer: Layer, value: Float[Array, "b q k d"]) -> Float[Array, "b q r"]:
        """The proxies of a layer's values."""
        if layer.spec.qkv_bias:
            value = value - layer.weights["v_bias"]
        return einsum("bqkd,kdr->bqr", value.astype(jnp.float32), self.directions[layer.index])

    @override
    def __repr__(self) -> str:
        return f"ValueProxy(<{'x'.join(map(str, jnp.shape(self.directions)))}>)"


@functools.partial(jax.jit, static_argnames="rank")
def _directions(model: Model, rank: int) -> Float[Array, "n k d r"]:
    spec = model.spec
    directions = jnp.zeros((spec.layers, spec.kv_heads, spec.head_dim, rank))

    def run(layer: Layer, directions: Any) -> Any:
        # The matrix in any form: its product with the unit vectors.
        units = jnp.eye(spec.width, dtype=model.dtype)[None]
        matrix = einsum("bqm,mhd->bqhd", units, layer.weights["v"])[0].astype(jnp.float32)
        matrix = matrix.reshape(spec.width, -1)

        # W^T W = U S^2 U^T; eigenvalues ascend.
        vectors = jnp.linalg.eigh(einsum("mi,mj->ij", matrix, matrix))[1][:, ::-1][:, :rank]
        return directions.at[layer.index].set(vectors.reshape(directions.shape[1:]))

    return walk(model.params, spec, rope_of(spec, 1), run, directions)


HALF = "half_update"  # phase of a layer that updates at most half of the peak's share


@dataclasses.dataclass(frozen=True)
class SPACache(DLLMCache):
    """Updates a share of the response per step that depends on the layer; renews all its keys and values.

    Use it like `DLLMCache`, when later layers change more than early ones.

    The share of the response whose attention and MLP a layer recomputes between refreshes is a Gaussian over
    the relative depth, with its own width on each side. The values tell which tokens changed, or low-rank
    proxies of them (`proxy`).

    Memory: As for `DLLMCache`, and any proxies.

    Limits: As for `DLLMCache`.

    Equals exact decoding when: prompt_every=1. With start = end = ratio, no proxy and prompt_every a multiple
      of response_every it equals `DLLMCache` with new keys for the whole response.
    Differences: As for `DLLMCache`, but without a mask token `prompt_every` refreshes the canvas. Proxies are
      computed from the values; the cosines are the same.

    Attributes:
      prompt_every: Refresh interval of the prompt, in steps of the whole generation. The response is
        refreshed with it, and every `response_every` steps.
      ratio: Share of the response updated in the layer at `peak`. `start`, `end` and `least` are no
        larger.
      start: Share at depth 0; the first layer itself updates all. The paper uses 0.03 for LLaDA.
      end: Share after the last layer.
      peak: Relative depth of the layer with the largest share, in [0, 1].
      least: Minimum share of any layer.
      proxy: Low-rank proxy of the model, `ValueProxy.of(model, rank)`. None compares the values themselves.
    """

    prompt_every: TracedPositiveInt = 50
    start: Fraction = 0.03
    end: Fraction = 0.13
    peak: Fraction = 0.75
    least: Fraction = 2**-5
    proxy: Annotated[ValueProxy | None, NoneMeans("the values themselves")] = None

    renews_keys: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("start", "end", "least"):
            if (share := getattr(self, name)) > self.ratio:
                raise ValueError(f"{name}={share} must be at most the peak's ratio={self.ratio}")

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """As `DLLMCache`, and the proxies."""
        cache = super().init(spec, layout, batch, dtype)
        if self.proxy is None:
            return cache
        self.proxy.check(spec)
        proxy = jnp.zeros((*cache.layers.mlp.shape[:3], self.proxy.rank))
        return cache._replace(layers=cache.layers._replace(proxy=proxy))

    @override
    def due(
        self, canvas: Canvas, first: Bool[Array, ""] | bool
    ) -> tuple[Bool[Array, "b 1"], Bool[Array, "b 1"]]:
        """As `DLLMCache`; with the prompt, the response is refreshed too."""
        prompt, response = super().due(canvas, first)
        return prompt, response | prompt

    @override
    def similarity(
        self, layer: Layer, value: Float[Array, "b q k d"], cache: LayerCache, rows: Rows
    ) -> Float[Array, "b q"]:
        """Of the proxies of this step and of the last."""
        if self.proxy is None:
            return super().similarity(layer, value, cache, rows)
        stored = cache.read().proxy
        return cosine(self.proxy(layer, value), rows.last(stored.shape[1]).take(stored))

    @override
    def most_changed(
        self, layer: Layer, similarity: Float[Array, "b q"], among: Bool[Array, "b q"], size: int | None
    ) -> Bool[Array, "b q"]:
        return least_similar(similarity, among, self._ratios(layer.spec), layer.index, size)

    def _ratios(self, spec: ModelSpec) -> tuple[float, ...]:
        """Shares of updates by layer."""
        return gaussian_ratios(spec.layers, self.ratio, self.start, self.end, self.peak, self.least)

    @override
    def updating(self, layer: int | None, spec: ModelSpec) -> str:
        """Layers that update at most half of the peak's share have a width of their own."""
        if layer and 2 * self._ratios(spec)[layer] <= self.ratio:
            return HALF
        return super().updating(layer, spec)

    @override
    def updated(self, phase: str, response: int) -> int | None:
        return int(response * self.ratio / 2) if phase == HALF else super().updated(phase, response)

    @override
    def renew(
        self,
        layer: Layer,
        x: Float[Array, "b q m"],
        value: Float[Array, "b q k d"],
        stale: Bool[Array, "b q"],
        cache: LayerCache,
        rows: Rows,
        canvas: Canvas,
    ) -> LayerCache:
        """Keys, values and proxies of the whole response, and of the prompt at its refreshes."""
        cache = super().renew(layer, x, value, stale, cache, rows, canvas)
        if self.proxy is None:
            return cache
        renewed = stale | (rows.positions >= canvas.layout.prompt)
        tail = rows.last(cache.read().mlp.shape[1])
        proxy = after_reading(stale, self.proxy(layer, value), rows)
        return cache.write(tail.where(renewed), proxy=proxy)
