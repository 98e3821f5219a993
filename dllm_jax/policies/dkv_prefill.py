"""dKV-Cache-Prefill (arXiv:2505.15781, section 3.3): the prompt's K/V are those of the first step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import key_mask, require_full_attention
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows


@dataclasses.dataclass(frozen=True)
class DKVPrefill(Policy):
    """Reuses the prompt's K/V of the first step, and stores nothing else.

    With a shifted head the last prompt token is recomputed: it predicts the first response token.

    Exact limit: one step in all, or no prompt.
    Departures: the reference has Dream only.
    """

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K and V of the prompt positions that are never recomputed."""
        require_full_attention(spec, "DKVPrefill")
        slots = max(layout.prompt - spec.shifted, 0)
        return Cache(KV.zeros(spec, batch, slots, dtype, scattered=False), shared=())

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first step, then the response and the positions that predict it."""
        return canvas.first_step | canvas.response_inputs

    @override
    def layer(
        self, layer: Layer, x: Float[Array, "b q m"], cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Float[Array, "b q m"], LayerCache]:
        """The first step stores the prompt; later ones attend to it and to themselves."""
        q, k = layer.qk(x, rows.index)
        new, mask, slots = KV(k, layer.value(x)), cache.attends(rows, canvas), cache.read().k.shape[1]

        # The first step attends to the canvas as it is, and stores the prompt's pairs.
        if rows.full:
            begins = canvas.active & canvas.first_step[:, 0]
            cache = cache.replace(begins, jax.tree.map(lambda a: a[:, :slots], new))
        # Later ones attend to the stored prompt and, behind it, to what they compute.
        else:
            new = jax.tree.map(lambda stored, a: jnp.concatenate([stored, a], axis=1), cache.read(), new)
            mask = key_mask(jnp.concatenate([canvas.valid[:, :slots], rows.real], axis=1))
        o, _ = layer.attention(q, new.k, new.v, mask)
        return layer.finish(x, o), cache

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response, and with a shifted head one position more."""
        return (layout.response_inputs(spec.shifted),)
