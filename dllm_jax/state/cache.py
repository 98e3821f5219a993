"""The cache pytree, and one layer's view of it while the layers run.

It has the form of the model's parameters. Where the layers are stacked, so is their storage: it is in the
scan's carry and is written in place at [layer, sequence, position]. Passed through `lax.scan` as per-layer
inputs and outputs, all of it would be copied in every step. Where the layers are separate, each has arrays of
its own, and reading one copies nothing. Keys and values lie in memory in one order of axes for all loops
(`dllm_jax.xla.order`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from dllm_jax.nn.kernels import BY_DEFAULT, Kernels
from dllm_jax.nn.layer import LayerIndex
from dllm_jax.nn.mask import Mask
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, full_rows, one_stream
from dllm_jax.xla.order import same_in_all_loops
from dllm_jax.xla.stacks import of_layer, put_of_layer, put_slots


class Cache(NamedTuple):
    """State that a policy keeps between denoising steps.

    Attributes:
      layers: per-layer storage; every leaf is stacked [n b s ...], s being slots. While a model with separate
        layers runs, a list with one such structure per layer, leaves [b s ...]; empty if nothing is stored.
      shared: anything else (statistics, tracked positions), leaves of any shape with an axis of sequences.
      extra_positions: positions that each layer has computed beyond those selected, which statistics count
        and then set to zero; None for a policy whose layers compute the selection alone. Negative where
        layers compute fewer.
      no_output: Computed positions that have no output in this step, because layers let them go; None for a
        policy whose layers let none go. They are no candidates of the step.
    """

    layers: PyTree
    shared: PyTree
    extra_positions: Float[Array, "b n"] | None = None
    no_output: Bool[Array, "b l"] | None = None

    def in_order(self, kernels: Kernels) -> "Cache":
        """The cache with stored pairs in the order in memory that writes give them, stated again.

        Symptom: XLA carries keys and values through loops around layers in another order than layers write,
          and copies them from one to the other and back.
        Seen on: H100, jaxlib 0.12.0.1; not with 0.10.2.
        Cost: A partial step of `ElasticCache` over two layers of LLaDA-8B, before 2.58 GB, after 2.41.
        Test: test_cache.py::test_the_order_of_stored_pairs_is_stated_again

        Args:
          kernels: The model's, which say how pairs lie in memory.
        """
        axes = 4 if isinstance(self.layers, list) else 5  # of a layer's pairs, or of all layers'
        state = lambda x: same_in_all_loops(x, kernels.pairs_as_named_on_cuda, rules=kernels.rules)
        layers = jax.tree.map(lambda x: state(x) if x.ndim == axes else x, self.layers)
        return self._replace(layers=layers)

    def with_output(self, rows: Rows, streams: int) -> Rows:
        """The rows of the conditional stream that have an output in this step."""
        if self.no_output is None:
            return rows
        return rows.where(~rows.take(one_stream(self.no_output, 0, streams)))

    def take_extra_positions(self, canvas: Canvas, streams: int) -> tuple[Float[Array, "b n"], "Cache"]:
        """The extra positions of the conditional stream, and the cache with their count at zero."""
        extra = self.extra_positions
        if extra is None:
            return jnp.zeros((len(canvas.tokens), canvas.spec.layers)), self
        return one_stream(extra, 0, streams), self._replace(extra_positions=jnp.zeros_like(extra))

    def separate(self) -> "Cache":
        """The same with a list of layers, as `Policy.layer` finds it in a model with separate layers."""
        leaves, structure = jax.tree.flatten(self.layers)
        # A policy that stores nothing has no array to count the layers by.
        layers = [jax.tree.unflatten(structure, part) for part in zip(*leaves, strict=True)] if leaves else []
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
          slots: Number of slots per sequence.
          dtype: Dtype of keys and values.
          scattered: single slots will be written; if not, only by `LayerCache.replace` and `write_last`, and
            the slots lie in memory as attention reads them. It changes speed, never what is computed.
        """
        shape = (spec.layers, batch, slots, spec.kv_heads, spec.head_dim)
        empty = lambda: same_in_all_loops(jnp.zeros(shape, dtype), scattered=scattered)
        return KV(empty(), empty())


class WindowKV(NamedTuple):
    """Rotated keys and values of the last s positions, in a layer that attends to a window of its context.

    Position p lies in slot p % s until a later one takes it. So a block of c positions, and the window of W
    before it, have s = W + c slots.
    """

    k: Float[Array, "b s k d"]
    v: Float[Array, "b s k d"]


# -- the storage as a layer finds it: two forms with the same members ------------------------------------


class Stacked(NamedTuple):
    """The storage of all layers [n b s ...], and which of them runs."""

    layers: PyTree
    index: Int[Array, ""]

    def read(self) -> PyTree:
        """The arrays of the layer that runs."""
        return jax.tree.map(lambda array: of_layer(array, self.index), self.layers)

    def put_last(
        self, array: Shaped[Array, "n b s *d"], new: Shaped[Array, "b q *d"]
    ) -> Shaped[Array, "n b s *d"]:
        """One of the arrays with new values in the layer's last slots."""
        start = self.index, 0, array.shape[2] - new.shape[1], *[0] * (array.ndim - 3)
        return jax.lax.dynamic_update_slice(array, new[None], start, allow_negative_indices=False)

    def changed(self, change: Callable[[PyTree], PyTree], ahead: int) -> "Stacked":
        """The storage after a change of the layer `ahead` of the one that runs."""
        return self._replace(layers=change(self.layers))

    def put(
        self, array: Shaped[Array, "n b s *d"], rows: Rows, new: Shaped[Array, "b q *d"], ahead: int
    ) -> Shaped[Array, "n b s *d"]:
        """One of the arrays with new values at the rows; at a layer beyond the last, unchanged."""
        # In a full step the layer is replaced in place; what a sequence did not compute keeps its value.
        index = self.index + ahead
        if rows.in_place and rows.start <= 0:
            stored = of_layer(array, index)
            renewed = jnp.where(index < len(array), rows.put(stored, new), stored)
            return put_of_layer(array, renewed, index)
        # At padding, and at a layer beyond the last, there is no such index: nothing is written.
        return put_slots(array, new, index, rows.index)

    def into(self, layers: PyTree, layer: LayerIndex) -> PyTree:
        """The storage of all layers, in which this one has changed."""
        return self.layers


class Separate(NamedTuple):
    """The storage of the layer that runs [b s ...] and, unless it is the last, of the following one."""

    layers: list[PyTree]

    def read(self) -> PyTree:
        """The arrays of the layer that runs."""
        return self.layers[0]

    def put_last(
        self, array: Shaped[Array, "b s *d"], new: Shaped[Array, "b q *d"]
    ) -> Shaped[Array, "b s *d"]:
        """One of the arrays with new values in its last slots."""
        return jax.lax.dynamic_update_slice_in_dim(array, new, array.shape[1] - new.shape[1], axis=1)

    def changed(self, change: Callable[[PyTree], PyTree], ahead: int) -> "Separate":
        """The storage after a change of the layer `ahead` of the one that runs."""
        return Separate([change(layer) if i == ahead else layer for i, layer in enumerate(self.layers)])

    def put(
        self, array: Shaped[Array, "b s *d"], rows: Rows, new: Shaped[Array, "b q *d"], ahead: int
    ) -> Shaped[Array, "b s *d"]:
        """One of the arrays with new values at the rows."""
        return rows.put(array, new)

    def into(self, layers: PyTree, layer: LayerIndex) -> PyTree:
        """The storage of all layers, in which this one has changed."""
        assert isinstance(layer, int), "separate layers are unrolled"
        return [*layers[:layer], *self.layers, *layers[layer + len(self.layers) :]]


class LayerCache(NamedTuple):
    """The cache as one layer sees it while the layers run: `Policy.layer` takes it and returns it changed.

    Attributes:
      storage: Storage of the layers, in the form of the model's parameters; empty if the policy stores
        nothing.
      shared: State shared between layers (`Cache`); change it by `cache._replace(shared=...)`.
      kernels: the model's, which say how pairs lie in memory.
      readable: the positions that may be attended to (`Policy.reads`); None where that is all but padding.
      no_output: Positions that layers let go (`Cache`); change it as `shared`.
    """

    storage: Stacked | Separate
    shared: PyTree
    kernels: Kernels = BY_DEFAULT
    readable: Bool[Array, "b l"] | None = None
    no_output: Bool[Array, "b l"] | None = None

    @staticmethod
    def of(
        cache: Cache,
        layer: LayerIndex,
        kernels: Kernels = BY_DEFAULT,
        readable: Bool[Array, "b l"] | None = None,
    ) -> "LayerCache":
        """One layer's view of the cache."""
        if isinstance(cache.layers, list):
            assert isinstance(layer, int), "separate layers are unrolled"
            storage = Separate(cache.layers[layer : layer + 2])
        else:
            storage = Stacked(cache.layers, jnp.asarray(layer, jnp.int32))
        return LayerCache(storage, cache.shared, kernels, readable, cache.no_output)

    def into(self, cache: Cache, layer: LayerIndex) -> Cache:
        """Returns the cache with a layer's changes to its view."""
        # The set that is read is the step's, not the cache's: it stays with the view.
        layers = self.storage.into(cache.layers, layer)
        return cache._replace(layers=layers, shared=self.shared, no_output=self.no_output)

    def read(self) -> PyTree:
        """This layer's storage: the structure that `Policy.init` returned, leaves [b s ...]."""
        return self.storage.read()

    def attends(self, rows: Rows, canvas: Canvas) -> Mask | None:
        """Builds the attention mask of the rows, for keys in the order of the canvas [b #h #q l].

        None where these are all positions: nothing is padding, the policy reads everything, and the model has
        no blocks. Programs of such runs hold no mask. Of a policy that stores nothing, the keys are
        those of the rows; of a layer that stores a window (`WindowKV`), its slots, but in a full step.
        """
        mask = canvas.attends(rows, self.readable)
        if rows.full:
            return mask
        if not self._stores:
            return rows.keys(mask)
        if (slots := self._ring) is None or mask is None:
            return mask
        newest = jnp.where(canvas.causal, canvas.block_start[:, None], canvas.block_end) - 1
        position = newest - (newest - jnp.arange(slots)) % slots
        here = jnp.clip(position, 0, mask.shape[3] - 1)[:, None, None]
        here = jnp.broadcast_to(here, (*mask.shape[:3], slots))
        return jnp.take_along_axis(mask, here, axis=3) & (position >= 0)[:, None, None]

    def update(self, rows: Rows, new: PyTree) -> tuple["LayerCache", PyTree]:
        """Writes new values [b q ...] of every array over the stored ones.

        Returns:
          the changed cache, and this layer after the write: [b s ...], new where computed, stored elsewhere.
          A policy that stores nothing computes everything that exists, and gets the new values back; so does
          a layer that stores a window, in a full step.
        """
        if not self._stores:
            return self, new

        # What was written is read back: a read before the write would need `read_before_write`. Where the
        # last pairs alone are stored, a full step is a first one, which computes all that it reads.
        slots = self._ring
        places, values = (rows, new) if slots is None else (rows.in_ring(slots), WindowKV(*new))
        cache = self._changed(lambda arrays, write: jax.tree.map(write, arrays, values), places)
        return cache, new if slots is not None and rows.full else cache.read()

    def replace(self, where: Bool[Array, "b"], new: PyTree, part: str | None = None) -> "LayerCache":
        """Writes new values [b s ...] of all slots of every array, in the marked sequences.

        For storage that is written in no other way but by `write_last`, see `KV.zeros`.

        Args:
          where: marked sequences.
          new: values of the storage, or of the part.
          part: Name of the field that is written; None for the whole storage.
        """
        slots = jax.tree.leaves(new)[0].shape[1]
        every = full_rows(jnp.broadcast_to(where[:, None], (len(where), slots)))
        return self._changed(_writes(new, part), every, scattered=False)

    def write_last(self, new: PyTree, part: str | None = None) -> tuple["LayerCache", PyTree]:
        """Writes new values [b q ...] into the last q slots of every array, in all sequences.

        For pairs that only the step itself reads, after those that `replace` has stored.

        Args:
          new: values of the storage, or of the part.
          part: Name of the field that is written; None for the whole storage.

        Returns:
          the changed cache, and this layer after the write.
        """
        cache = self._changed(_writes(new, part), None, scattered=False)
        return cache, cache.read()

    def write(self, rows: Rows, ahead: int = 0, **parts: PyTree) -> "LayerCache":
        """Writes new values [b q ...] of the named fields of the storage; the other fields stay.

        Args:
          rows: slots of these fields, e.g. `rows.last(s)` where they hold the last s positions only.
          ahead: 1 writes to the following layer's storage; in the last layer nothing is written.
          **parts: Arrays by field name.
        """

        def change(storage, write):
            written = {name: jax.tree.map(write, getattr(storage, name), new) for name, new in parts.items()}
            return storage._replace(**written)

        return self._changed(change, rows, ahead)

    @property
    def _ring(self) -> int | None:
        """Slots of a layer that stores the pairs of its window alone; None of other layers."""
        stored = self.storage.layers[0] if isinstance(self.storage, Separate) else None
        return stored.k.shape[1] if isinstance(stored, WindowKV) else None

    @property
    def _stores(self) -> bool:
        """Whether there are arrays: the exact decoder has none, what it has just computed is all there is."""
        return bool(jax.tree.leaves(self.storage.layers))

    def _changed(
        self,
        change: Callable[[PyTree, Callable[[Array, Array], Array]], PyTree],
        rows: Rows | None,
        ahead: int = 0,
        scattered: bool = True,
    ) -> "LayerCache":
        """The cache with new values at the rows.

        Args:
          change: takes a layer's storage and a function that writes new values into one of its arrays.
          rows: slots that are written; None are the last ones, as many as there are new values.
          ahead: 0 for this layer, 1 for the following one.
          scattered: Whether single slots are written (`KV.zeros`).
        """

        # Keys and values keep one order of axes in memory in every loop.
        def write(array: Array, new: Array) -> Array:
            new, storage = new.astype(array.dtype), self.storage
            written = storage.put_last(array, new) if rows is None else storage.put(array, rows, new, ahead)
            if new.ndim != 4:
                return written
            kernels = self.kernels
            return same_in_all_loops(written, kernels.pairs_as_named_on_cuda, scattered, kernels.rules)

        return self._replace(storage=self.storage.changed(lambda layer: change(layer, write), ahead))


def _writes(new: PyTree, part: str | None) -> Callable[[PyTree, Callable[[Array, Array], Array]], PyTree]:
    """A change of a layer's storage, or of one of its fields, that writes new values of every array."""

    def change(layer: PyTree, write: Callable[[Array, Array], Array]) -> PyTree:
        if part is None:
            return jax.tree.map(write, layer, new)
        return layer._replace(**{part: jax.tree.map(write, getattr(layer, part), new)})

    return change


# -- candidate tokens and scores of each position in one step --------------------------------------


class Proposal(NamedTuple):
    """Candidate token of every position, and the sampler's score of it.

    Attributes:
      token: the candidate; mask_id where there is none.
      score: the sampler's confidence, float32; -inf where the position holds a token, is not scored
        (`Policy.scored`), waits for a constraint or could not be predicted in this step.
      delayed: Candidates that the step's decision counts as least sure, whatever their score
        (`Sampler.delay_eos`); None if the sampler delays none.
    """

    token: Int[Array, "b l"]
    score: Float[Array, "b l"]
    delayed: Bool[Array, "b l"] | None = None
