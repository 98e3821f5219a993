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

        # A partial step scatters its rows into the stacked arrays, in place, and reads the layer back.
        if not rows.full:
            cache = self._replace(layers=jax.tree.map(lambda a, x: self._write(a, rows, x), self.layers, new))
            return cache, cache.read()

        # A full step has a value for every position: a select takes the place of the scatter.
        merged = jax.tree.map(lambda stored, x: _merge(stored, rows, x), self.read(), new)
        return self._replace(layers=jax.tree.map(self._replace_layer, self.layers, merged)), merged

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
        # At padding, and at a layer beyond the last, there is no such index: the scatter drops the write.
        if not rows.full:
            batch = jnp.arange(array.shape[1])[:, None]
            return array.at[self.index, batch, rows.index].set(new.astype(array.dtype), mode="drop")
        stored = jax.lax.dynamic_index_in_dim(array, self.index, keepdims=False)
        return self._replace_layer(array, _merge(stored, rows, new))

    def _replace_layer(self, array: Array, layer: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(array, layer, self.index, 0)


def _merge(stored: Array, rows: Rows, new: Array) -> Array:
    """A layer after a full step: new values where a sequence computed the position, else the stored ones."""
    real = rows.real.reshape(*rows.real.shape, *[1] * (new.ndim - 2))
    return jnp.where(real, new.astype(stored.dtype), stored)
