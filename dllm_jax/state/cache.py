"""The cache pytree, and one layer's view of it inside the layer scan.

The stacked arrays are in the scan's carry and are written in place at [layer, sequence, position]. Passed
through `lax.scan` as per-layer inputs and outputs, all of it would be copied in every step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.rows import Rows


class Cache(NamedTuple):
    """What a policy keeps between denoising steps.

    Attributes:
      layers: per-layer storage; every leaf is stacked [n b s ...], s being slots.
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


class LayerCache(NamedTuple):
    """The cache as one layer sees it while the layers run: `Policy.layer` takes it and returns it changed.

    Attributes:
      layers: the storage of all layers, see `Cache`; empty if the policy stores nothing.
      index: which layer this is.
      shared: see `Cache`; what a layer puts there, the next one finds. `cache._replace(shared=...)`.
    """

    layers: PyTree
    index: Int[Array, ""]
    shared: PyTree

    def read(self) -> PyTree:
        """This layer's storage: the same structure, leaves [b s ...]."""
        return jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, self.index, keepdims=False), self.layers
        )

    def update(self, rows: Rows, new: PyTree) -> tuple["LayerCache", PyTree]:
        """Writes new values [b q ...] of every array over the stored ones.

        Returns:
          the changed cache, and this layer after the write: [b s ...], new where computed, stored elsewhere.
          A policy that stores nothing computes everything, and gets the new values back.
        """
        # The exact decoder stores nothing: what it has just computed is all there is.
        if not jax.tree.leaves(self.layers):
            return self, new

        # What was written is read back: reading before the write would make XLA copy the stacked arrays.
        cache = self._replace(layers=jax.tree.map(lambda a, x: self._write(a, rows, x), self.layers, new))
        return cache, cache.read()

    def write(self, rows: Rows, **parts: PyTree) -> "LayerCache":
        """Writes new values [b q ...] of the named fields of the storage; the other fields stay.

        Args:
          rows: slots of these fields, e.g. `rows.last(s)` where they hold the last s positions only.
          **parts: by field name.
        """
        written = {
            name: jax.tree.map(lambda a, x: self._write(a, rows, x), getattr(self.layers, name), new)
            for name, new in parts.items()
        }
        return self._replace(layers=self.layers._replace(**written))

    def _write(self, array: Array, rows: Rows, new: Array) -> Array:
        """The stacked array [n b s ...] with new values of this layer."""
        new = new.astype(array.dtype)

        # At padding, and at a layer beyond the last, there is no such index: the scatter drops the write.
        if not rows.full:
            batch = jnp.arange(array.shape[1])[:, None]
            return array.at[self.index, batch, rows.index].set(new, mode="drop")
        # In a full step the layer is replaced in place; what a sequence did not compute keeps its value.
        stored = jax.lax.dynamic_index_in_dim(array, self.index, keepdims=False)
        real = rows.real.reshape(*rows.real.shape, *[1] * (new.ndim - 2))
        return jax.lax.dynamic_update_index_in_dim(array, jnp.where(real, new, stored), self.index, 0)
