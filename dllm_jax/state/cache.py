"""The cache pytree, and one layer's view of it inside the layer scan.

The stacked arrays are in the scan's carry and are written in place at [layer, row, position]. Passed through
`lax.scan` as per-layer inputs and outputs, the whole cache would be copied in every step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.rows import Rows


class Cache(NamedTuple):
    """What a policy keeps between steps.

    Attributes:
      layers: per-layer storage; every leaf is stacked [n b ...].
      shared: anything else (statistics, tracked positions), leaves of any shape.
    """

    layers: PyTree
    shared: PyTree


class KV(NamedTuple):
    """Rotated keys and values in s slots, usually the canvas positions; stacked [n b s k d] in a `Cache`."""

    k: Float[Array, "*n b s k d"]
    v: Float[Array, "*n b s k d"]

    @staticmethod
    def zeros(spec: ModelSpec, batch: int, slots: int, dtype: Any) -> "KV":
        """Empty slots for every layer: 2 n b s k d scalars."""
        shape = (spec.layers, batch, slots, spec.kv_heads, spec.head)
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class LayerView(NamedTuple):
    """One layer of a stacked store.

    Attributes:
      stack: pytree of arrays [n b l ...]; None if the policy stores nothing.
      layer: index into n.
    """

    stack: PyTree
    layer: Int[Array, ""]

    def read(self) -> PyTree:
        """This layer's arrays, [b l ...]."""
        return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, self.layer, keepdims=False), self.stack)

    def update(self, rows: Rows, fresh: PyTree) -> tuple["LayerView", PyTree]:
        """Writes fresh rows [b q ...] over the stored ones.

        Returns:
          the new view, and this layer after the write: [b l ...], fresh where computed, stored elsewhere.
          A policy that stores nothing computes whole rows only, and gets them back unchanged.
        """
        if not jax.tree.leaves(self.stack):
            return self, fresh
        view = self._replace(stack=jax.tree.map(lambda a, x: self._write(a, rows, x), self.stack, fresh))
        return view, fresh if rows.whole else view.read()

    def _write(self, array: Array, rows: Rows, fresh: Array) -> Array:
        fresh = fresh.astype(array.dtype)
        batch = array.shape[1]
        if not rows.whole:
            return array.at[self.layer, jnp.arange(batch)[:, None], rows.index].set(fresh, mode="drop")
        if batch > 1:  # an inactive row keeps its stored values
            moves = (rows.index[:, 0] < array.shape[2]).reshape(batch, *[1] * (fresh.ndim - 1))
            old = jax.lax.dynamic_index_in_dim(array, self.layer, keepdims=False)
            fresh = jnp.where(moves, fresh, old)
        return jax.lax.dynamic_update_index_in_dim(array, fresh, self.layer, 0)
