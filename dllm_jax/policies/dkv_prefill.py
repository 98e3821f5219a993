"""dKV-Cache-Prefill (arXiv:2505.15781, section 3.3): the prompt's K/V are those of the first step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from dllm_jax.nn.attention import key_mask
from dllm_jax.nn.layer import Block
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import KV, Cache, LayerView
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows


@dataclasses.dataclass(frozen=True)
class DKVPrefill(Policy):
    """Reuses the prompt's K/V of the first step, and stores nothing else.

    With a shifted head the last prompt token is recomputed: its row predicts the first response token.

    Exact limit: one step in all, or no prompt.
    Departures: the reference has Dream only.
    """

    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        """K and V of the prompt."""
        kept = max(layout.prompt - spec.shifted, 0)
        return Cache(KV.zeros(spec, batch, kept, dtype), shared=())

    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything once, then the response."""
        return canvas.first_step | canvas.answering

    def layer(
        self,
        block: Block,
        x: Float[Array, "b q m"],
        kv: LayerView,
        shared: PyTree,
        rows: Rows,
        canvas: Canvas,
    ) -> tuple[Float[Array, "b q m"], LayerView, PyTree]:
        """The first step stores the prompt; later ones attend to it and to themselves."""
        q, k = block.qk(x, rows)
        now, mask, kept = KV(k, block.value(x)), canvas.attends(rows), kv.stack.k.shape[2]
        if rows.whole:
            kv, _ = kv.update(rows, jax.tree.map(lambda a: a[:, :kept], now))
        else:
            now = jax.tree.map(lambda old, a: jnp.concatenate([old, a], axis=1), kv.read(), now)
            computed = rows.index < canvas.layout.length
            mask = key_mask(jnp.concatenate([canvas.valid[:, :kept], computed], axis=1))
        o, _ = block.attention(q, now.k, now.v, mask)
        return block.finish(x, o), kv, shared

    def widths(self, layout: Layout) -> tuple[int, ...]:
        """The response, and with a shifted head one row more."""
        return (layout.response, layout.answering)
