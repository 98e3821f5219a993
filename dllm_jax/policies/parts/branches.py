"""Storage of a dLLM-Cache layer: keys and values, and both branch outputs of the response."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.parts.partial import put_tail
from dllm_jax.state.cache import LayerView
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows


class Store(NamedTuple):
    """The layers' storage, stacked.

    Attributes:
      k: rotated keys of the last s canvas positions (`DLLMCache`: of all of them).
      v: their values.
      attention: the attention branch's output at the last t positions: the response, and with a shifted
        head the row before it. Outputs of the other prompt rows are never read between refreshes.
      mlp: the MLP branch's output at the same positions.
    """

    k: Float[Array, "n b s k d"]
    v: Float[Array, "n b s k d"]
    attention: Float[Array, "n b t m"]
    mlp: Float[Array, "n b t m"]


def write_keys(kv: LayerView, rows: Rows, k: Float[Array, "b w k d"], canvas: Canvas) -> LayerView:
    """Stores the keys of those rows whose positions the store holds."""
    keys = put_tail(kv.stack.k, kv.layer, rows.index, canvas.layout.length, k)
    return kv._replace(stack=kv.stack._replace(k=keys))


def branches(spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> tuple[Array, Array]:
    """Zeros for the branch outputs of the response and the row that predicts its first token."""
    tail = min(layout.response + int(spec.shifted), layout.length)
    shape = (spec.layers, batch, tail, spec.width)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
