"""The mesh that XLA's partitioner splits a program over, and functions that each device runs itself."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float


@runtime_checkable
class Rules(Protocol):
    """Says which axes of a mesh split an array, see `dllm_jax.nn.mesh.MeshRules`."""

    def spec(self, mesh: AbstractMesh, axes: str, lengths: Mapping[str, int]) -> PartitionSpec:
        """How an array with these axes lies on a mesh."""
        ...


def partitioned_over() -> AbstractMesh | None:
    """The mesh that XLA's partitioner splits the program being traced over; None if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or not mesh.auto_axes else mesh


def on_each_device(
    function: Callable[[Array], Array], x: Float[Array, "..."], rules: Rules | None, axes: str
) -> Float[Array, "..."]:
    """`function(x)`, which over a mesh each device computes of its own part.

    Without rules nothing is said about the array over a mesh: it stays as it is.

    Symptom: The partitioner gathers the whole array on every device to meet a constraint on its order.
    Seen on: Four TPU v5e, jaxlib 0.10.2.
    Cost: A partial step of `DualCache`, before 10.6 of the roofline, after 1.00. A full step without any
      constraint 3.6, after 1.04.
    Test: test_xla.py::test_each_device_of_a_mesh_states_the_order_of_its_own_part

    Args:
      function: Function of an array, which it returns in the same shape.
      x: an array.
      rules: Sharding rules of the model.
      axes: One letter per axis of `x`.
    """
    mesh = partitioned_over()
    if mesh is None:
        return function(x)
    if rules is None:
        return x
    split = rules.spec(mesh, axes, dict(zip(axes, x.shape, strict=True)))
    return jax.shard_map(function, in_specs=split, out_specs=split, check_vma=False)(x)
