"""Storage of a dLLM-Cache layer: keys and values, and both branch outputs of the response."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.cache import KV
from dllm_jax.state.layout import Layout


class OutputStore(NamedTuple):
    """The layers' storage, stacked.

    Attributes:
      k: rotated keys of the last s canvas positions (`DLLMCache`: of all of them).
      v: their values.
      attention: the attention branch's output at the last t positions: the response, and with a shifted
        head the position before it. Outputs elsewhere in the prompt are never read between refreshes.
      mlp: the MLP branch's output at the same positions.
      proxy: SPA-Cache's proxies of the last step there; None where there are none.
    """

    k: Float[Array, "n b s k d"]
    v: Float[Array, "n b s k d"]
    attention: Float[Array, "n b t m"]
    mlp: Float[Array, "n b t m"]
    proxy: Float[Array, "n b t r"] | None = None

    @staticmethod
    def zeros(spec: ModelSpec, layout: Layout, batch: int, slots: int, dtype: Any) -> "OutputStore":
        """Empty storage; K and V of the last `slots` positions."""
        tail = min(layout.response + int(spec.shifted), layout.length)
        output = jnp.zeros((spec.layers, batch, tail, spec.width), dtype)
        return OutputStore(*KV.zeros(spec, batch, slots, dtype), output, output)
