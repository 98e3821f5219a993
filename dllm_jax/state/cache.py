"""The cache pytree, and one layer's view of it while the layers run.

It has the form of the model's parameters. Where the layers are stacked, so is their storage: it is in the
scan's carry and is written in place at [layer, sequence, position]. Passed through `lax.scan` as per-layer
inputs and outputs, all of it would be copied in every step. Where the layers are separate, each has arrays of
its own, and reading one copies nothing. Keys and values lie in memory in one order of axes for all loops
(`dllm_jax.nn.memory`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from dllm_jax.nn.attention import Mask
from dllm_jax.nn.kernels import BY_DEFAULT, Kernels
from dllm_jax.nn.layer import LayerIndex
from dllm_jax.nn.memory import same_in_all_loops
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, full_rows


class Cache(NamedTuple):
    """What a policy keeps between denoising steps.

    Attributes:
      layers: per-layer storage; every leaf is stacked [n b s ...], s being slots. While a model with separate
        layers runs, a list with one such structure per layer, leaves [b s ...].
      shared: anything else (statistics, tracked positions), leaves of any shape.
    """

    layers: PyTree
    shared: PyTree

    def separate(self) -> "Cache":
        """The same with a list of layers, as `Policy.layer` finds it in a model with separate layers."""
        leaves, structure = jax.tree.flatten(self.layers)
        # A policy that stores nothing has no array to count the layers by.
        layers = [jax.tree.unflatten(structure, one) for one in zip(*leaves, strict=True)] if leaves else []
        return self._replace(layers=layers)


class KV(NamedTuple):
    """Rotated keys and values in s slots, usually the canvas positions; stacked [n b s k d] in a `Cache`."""

    k: Float[Array, "*n b s k d"]
    v: Float[Array, "*n b s k d"]

    @staticmethod
    def zeros(spec: ModelSpec, batch: int, slots: int, dtype: Any, scattered: bool = True) -> "KV":
        """Empty slots for every layer: 2 n b s k d scalars.

        Args:
          spec: the model.
          batch: sequences.
          slots: of each sequence.
          dtype: of keys and values.
          scattered: single slots will be written; if not, only whole layers by `LayerCache.replace`, and the
            slots lie in memory as attention reads them. It changes speed, never what is computed.
        """
        shape = (spec.layers, batch, slots, spec.kv_heads, spec.head)
        empty = lambda: same_in_all_loops(jnp.zeros(shape, dtype), scattered=scattered)
        return KV(empty(), empty())


class LayerCache(NamedTuple):
    """The cache as one layer sees it while the layers run: `Policy.layer` takes it and returns it changed.

    Attributes:
      layers: the stacked storage of all layers, see `Cache`; empty if the policy stores nothing. Where layers
        are separate, a list of this layer's storage and, except in the last one, the following layer's.
      index: which layer this is, where they are stacked; else None.
      shared: see `Cache`; what a layer puts there, the next one finds. `cache._replace(shared=...)`.
      kernels: the model's, which say how pairs lie in memory.
    """

    layers: PyTree
    index: Int[Array, ""] | None
    shared: PyTree
    kernels: Kernels = BY_DEFAULT

    @staticmethod
    def of(cache: Cache, layer: LayerIndex, kernels: Kernels = BY_DEFAULT) -> "LayerCache":
        """One layer's view of the cache."""
        if isinstance(cache.layers, list):
            assert isinstance(layer, int), "separate layers are unrolled"
            return LayerCache(cache.layers[layer : layer + 2], None, cache.shared, kernels)
        return LayerCache(cache.layers, jnp.asarray(layer, jnp.int32), cache.shared, kernels)

    def into(self, cache: Cache, layer: LayerIndex) -> Cache:
        """The cache with what a layer has changed in its view of it."""
        if not isinstance(cache.layers, list):
            return Cache(self.layers, self.shared)
        assert isinstance(layer, int), "separate layers are unrolled"
        before, behind = cache.layers[:layer], cache.layers[layer + len(self.layers) :]
        return Cache([*before, *self.layers, *behind], self.shared)

    def read(self) -> PyTree:
        """This layer's storage: the structure that `Policy.init` returned, leaves [b s ...]."""
        if isinstance(self.layers, list):
            return self.layers[0]
        return jax.tree.map(
            lambda a: jax.lax.dynamic_index_in_dim(a, self._index, keepdims=False), self.layers
        )

    def attends(self, rows: Rows, canvas: Canvas) -> Mask | None:
        """Which of the stored pairs each of the rows may attend to; None where that is all of them.

        A layer that reads all positions asks its cache rather than the canvas, so that pairs may be evicted
        under it (`EvictPrompt`).
        """
        return canvas.attends(rows)

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
        cache = self._change(lambda own, write: jax.tree.map(write, own, new), rows)
        return cache, cache.read()

    def replace(self, where: Bool[Array, "b"], new: PyTree) -> "LayerCache":
        """Writes new values [b s ...] of all slots of every array, in the marked sequences.

        For storage that is written in no other way, see `KV.zeros`.
        """
        slots = jax.tree.leaves(new)[0].shape[1]
        every = full_rows(jnp.broadcast_to(where[:, None], (len(where), slots)))
        return self._change(lambda own, write: jax.tree.map(write, own, new), every, scattered=False)

    def write(self, rows: Rows, **parts: PyTree) -> "LayerCache":
        """Writes new values [b q ...] of the named fields of the storage; the other fields stay.

        Args:
          rows: slots of these fields, e.g. `rows.last(s)` where they hold the last s positions only.
          **parts: by field name.
        """
        return self._write_parts(rows, parts, ahead=0)

    def write_next(self, rows: Rows, **parts: PyTree) -> "LayerCache":
        """As `write`, to the storage of the following layer; in the last layer nothing is written."""
        return self._write_parts(rows, parts, ahead=1)

    def _write_parts(self, rows: Rows, parts: dict[str, PyTree], ahead: int) -> "LayerCache":
        def change(storage, write):
            written = {name: jax.tree.map(write, getattr(storage, name), new) for name, new in parts.items()}
            return storage._replace(**written)

        return self._change(change, rows, ahead)

    def _change(
        self,
        change: Callable[[PyTree, Callable[[Array, Array], Array]], PyTree],
        rows: Rows,
        ahead: int = 0,
        scattered: bool = True,
    ) -> "LayerCache":
        """The cache with the storage of the layer `ahead` of this one changed.

        Args:
          change: takes the storage and a function that writes new values of the rows into one of its arrays.
          rows: slots that are written.
          ahead: 0 or 1.
          scattered: as of `KV.zeros`.
        """
        stacked = not isinstance(self.layers, list)
        write_one = functools.partial(_write_stacked, index=self._index + ahead) if stacked else _write

        def write(array, new):
            written = write_one(array, rows, new.astype(array.dtype))
            return same_in_all_loops(written, self.kernels, scattered) if new.ndim == 4 else written

        if stacked:
            return self._replace(layers=change(self.layers, write))
        changed = [change(one, write) if i == ahead else one for i, one in enumerate(self.layers)]
        return self._replace(layers=changed)

    @property
    def _index(self) -> Int[Array, ""]:
        assert self.index is not None, "stacked layers have an index"
        return self.index


def _write(array: Float[Array, "b s *d"], rows: Rows, new: Float[Array, "b q *d"]) -> Float[Array, "b s *d"]:
    """One layer's array with new values at the rows."""
    if rows.full:
        return rows.put(array, new)
    return array.at[jnp.arange(len(array))[:, None], rows.index].set(new, mode="drop")


def _write_stacked(
    array: Float[Array, "n b s *d"], rows: Rows, new: Float[Array, "b q *d"], index: Int[Array, ""]
) -> Float[Array, "n b s *d"]:
    """The stacked array with new values of one layer at the rows; at a layer beyond the last, unchanged."""
    # In a full step the layer is replaced in place; what a sequence did not compute keeps its value.
    if rows.full:
        stored = jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
        kept = jnp.where(index < len(array), rows.put(stored, new), stored)
        return jax.lax.dynamic_update_index_in_dim(array, kept, index, 0)
    # At padding, and at a layer beyond the last, there is no such index: the scatter drops the write.
    batch = jnp.arange(array.shape[1])[:, None]
    return array.at[index, batch, rows.index].set(new, mode="drop")
