"""One layer's part of arrays that hold all layers: read where it is used, written in place."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped
from typing_extensions import override


def unknown_on_cuda(layer: Int[Array, ""] | int) -> Int[Array, ""]:
    """The index of a separate layer, which on CUDA XLA does not know: kernels read it from memory.

    The counter of a loop over stacked layers may not pass here: XLA fails to compile such a loop.

    Symptom: XLA writes the layer's number into the kernels that read or write its entry of an array, and
      compiles these kernels once per layer.
    Seen on: Programs of 32 layers for an H100, jaxlib 0.10.2.
    Cost: Different fusions of `MaskKV` before 364, after 146; of `ElasticCache` before 467, after 199.
    Test: test_xla.py::test_kernels_do_not_know_their_separate_layer_on_cuda
    """
    return jax.lax.platform_dependent(
        jnp.int32(layer), cuda=jax.lax.optimization_barrier, default=lambda layer: layer
    )


def of_layer(stack: Array, layer: Int[Array, ""] | int, axis: int = 0) -> Array:
    """The entry of one layer in an array of all of them; the layer is never negative.

    Symptom: An index that may be negative is compared with zero, which can be a kernel of its own.
    Seen on: CPU, jaxlib 0.10.2.
    Cost: Kernels of `ElasticCache`, before 201, after 136, together with other changes of 27 November 2026.
    Test: test_xla.py::test_indices_of_layers_are_never_compared_with_zero
    """
    return jax.lax.dynamic_index_in_dim(stack, layer, axis, keepdims=False, allow_negative_indices=False)


def put_of_layer(stack: Array, new: Array, layer: Int[Array, ""] | int, axis: int = 0) -> Array:
    """The array of all layers with a new entry of one, see `of_layer`."""
    return jax.lax.dynamic_update_index_in_dim(stack, new, layer, axis, allow_negative_indices=False)


def put_slots(
    stack: Shaped[Array, "n b s *d"],
    new: Shaped[Array, "b q *d"],
    layer: Int[Array, ""],
    slots: Int[Array, "b q"],
) -> Shaped[Array, "n b s *d"]:
    """The array of all layers with new entries in some slots of one, by a scatter.

    Slots and layers outside of the array are not written.

    Symptom: A slice of fewer slots than the layer has is written once more wherever the layer is read, and
      the array may be copied for it.
    Seen on: H100 and CPU, jaxlib 0.10.2.
    Cost: A partial step of `PrefixCache` on an H100 with 2 layers, before (by slices) 2.77 GB, after 2.67.
    Test: test_cache.py::test_the_last_slots_of_a_layer_are_written_by_a_scatter
    """
    batch = jnp.arange(stack.shape[1])[:, None]
    return stack.at[layer, batch, slots].set(new, mode="drop")


def put_in_window(
    store: Shaped[Array, "b s *d"],
    new: Shaped[Array, "b w *d"],
    first: Int[Array, "b"],
    where: Bool[Array, "b w"],
) -> Shaped[Array, "b s *d"]:
    """The store with new entries in some slots of each sequence's window, which lies in the store.

    Symptom: A TPU scatters in VMEM. XLA moves the whole store there and back, as long as it fits.
    Seen on: TPU v6e, jaxlib 0.10.2.
    Cost: Kept values of 32 layers in a layer of a full step of `MaskKV`, before 134 MB, after 4.
    Test: test_xla.py::test_a_window_takes_what_a_scatter_writes

    Args:
      store: Entries of each sequence.
      new: New entries of the window.
      first: First slot of each sequence's window.
      where: Slots of the window to write.
    """

    def of_sequence(store: Array, new: Array, first: Array, where: Array) -> Array:
        window = jax.lax.dynamic_slice_in_dim(store, first, len(new))
        where = where.reshape(-1, *(1,) * (new.ndim - 1))
        window = jnp.where(where, new.astype(store.dtype), window)
        return jax.lax.dynamic_update_slice_in_dim(store, window, first, 0)

    # The window of a single sequence stays a slice.
    if len(store) == 1:
        return of_sequence(store[0], new[0], first[0], where[0])[None]
    return jax.vmap(of_sequence)(store, new, first, where)


def traced_once(through: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., Any]:
    """`through(layer, ..)`, which Python traces once for all separate layers with arrays of the same shapes.

    XLA puts the function in place of its calls, so the compiled program is the same.

    Symptom: Python traces each of the separate layers again.
    Seen on: Programs of 32 layers for an H100, jaxlib 0.10.2.
    Cost: Tracing and lowering, `DualCache` before 5.3 CPU seconds, after 1.3; `MaskKV` before 13.2, after
      1.6.
    Test: test_engine.py::test_separate_layers_of_the_same_shapes_are_traced_once

    Args:
      through: Function of a layer and arrays.
      params: The model's parameters; of stacked layers a single one is traced anyway.
    """
    return jax.jit(through) if isinstance(params["layers"], list) else through


class OneOfStacked(Mapping[str, Any]):
    """The weights of one of the stacked layers, each read out of its stack where it is used.

    Symptom: A loop or a branch inside of a layer is given the layer's weights, which XLA copies out of the
      stacks for it, whether or not it runs. An `optimization_barrier`, or an index that depends on nothing of
      the loop, changes nothing.
    Seen on: TPU v6e, jaxlib 0.10.2.
    Cost: Copies in a layer of `DLLMCache`, `MaskKV` and `ElasticCache`, before 302 MB, after none.
    Test: test_xla.py::test_weights_of_a_loop_are_not_read_before_it_on_a_v5e
    """

    def __init__(self, stacks: dict[str, Any], index: Int[Array, ""]):
        self._stacks, self._index = stacks, index

    def in_trip(self, trip: Int[Array, ""]) -> "OneOfStacked":
        """The same weights in a loop of at most one trip, by an index that depends on its counter."""
        return OneOfStacked(self._stacks, self._index + trip)

    @override
    def __getitem__(self, name: str) -> Any:
        # Per leaf of the entry, as an int8 or low-rank matrix has several stacks: values and scales, base and
        # factors.
        return jax.tree.map(lambda stack: of_layer(stack, self._index), self._stacks[name])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._stacks)

    @override
    def __len__(self) -> int:
        return len(self._stacks)
