"""Chooses the implementation of each operation of a generation's steps, and divides them over a mesh.

XLA's partitioner cannot split a kernel. Sequences and heads are independent in every operation, so over a
mesh each device computes those it holds (`jax.shard_map`), and only an average over heads is exchanged. Of
XLA's own implementations only the sequences are divided so.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Shaped

from dllm_jax.nn.mesh import MeshRules, constrain
from dllm_jax.xla.partitioner import partitioned_over
from pallas_kernels import Choice, Operation


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Kernels:
    """The choice of implementations, see `pallas_kernels.choice`.

    Attributes:
      implementation: Name of an implementation, evidence or None.
      rules: Sharding rules of the mesh; None leaves that to XLA's partitioner, without kernels.
    """

    implementation: Choice = None
    rules: MeshRules | None = None

    @property
    def pairs_as_named_on_cuda(self) -> bool:
        """Whether attention on GPUs reads KV pairs as they are named, as cuDNN and our kernel do."""
        if not isinstance(self.implementation, tuple):
            return self.implementation not in (None, "xla")
        of_attention = (e for e in self.implementation if (e.operation, e.platform) == ("attention", "cuda"))
        return any(entry.implementation != "xla" for entry in of_attention)

    def of_all_heads(self, numbers: Shaped[Array, "b k *n"]) -> Shaped[Array, "b k *n"]:
        """Numbers of KV heads, which over a mesh every device reads of all heads, exchanged once."""
        return numbers if self.rules is None else constrain(numbers, self.rules, "b")

    def run(self, operation: Operation, *arrays: Any, **options: Any) -> Any:
        """The operation on whole arrays; over a mesh each device computes its sequences and heads.

        Query heads are split as the KV heads that they read, so only as far as these divide.
        """
        # Without rules, or outside of a partitioned program, arrays are whole: nothing is to be divided.
        mesh = partitioned_over()
        on_one_device = functools.partial(operation.run, options=options, implementation=self.implementation)
        if mesh is None or self.rules is None:
            return on_one_device(arrays)
        operation.check(*arrays, **options)
        split = _split(operation, arrays, mesh, self.rules)
        if not operation.takes_kernels(self.implementation, arrays):
            # XLA splits heads, and repeats kv heads where there are more devices. Sequences it would not keep
            # apart, since attention may take them one after another.
            split = {"b": split["b"]}
            if not split["b"]:
                return on_one_device(arrays)

        def part(*arrays: Any) -> Any:
            result = on_one_device(arrays)
            # Mean of means: every device holds equally many heads, as splits divide evenly, so this is the
            # mean of all.
            averaged = split.get("h") if operation.averages_heads else None
            return jax.lax.pmean(result, averaged) if averaged else result

        # An optional operand that is absent has no axes; its place in the signature is kept.
        specs = [
            PartitionSpec() if array is None else _spec(axes, split, array.shape)
            for axes, array in zip(operation.operands, arrays, strict=True)
        ]
        first, *others = (_spec(axes, split) for axes in operation.results)
        return jax.shard_map(
            part,
            in_specs=tuple(specs),
            out_specs=(first, *others) if others else first,
            # Axes that are not left to the partitioner: all of them, if heads are not.
            axis_names=set(mesh.axis_names if "h" in split else split["b"]),
            check_vma=False,  # kernels do not say over which axes their results differ
        )(*arrays)


def _split(
    operation: Operation, arrays: tuple[Any, ...], mesh: AbstractMesh, rules: MeshRules
) -> dict[str, tuple[str, ...]]:
    """Axes of the mesh that split sequences, KV heads and their query heads, by letter."""
    # Of operands that broadcast, the longest counts: an axis of length 1 is no reason not to split the
    # others.
    length = {"b": 1, "k": 1}
    for axes, array in zip(operation.operands, arrays, strict=True):
        for letter, size in () if array is None else zip(axes, array.shape, strict=True):
            if letter in length:
                length[letter] = max(length[letter], size)
    heads = rules.axes(mesh, "k", length["k"])
    return {"b": rules.axes(mesh, "b", length["b"]), "k": heads, "h": heads}


def _spec(axes: str, split: dict[str, tuple[str, ...]], shape: tuple[int, ...] = ()) -> PartitionSpec:
    """How an array is split; an axis of length 1 serves all parts."""
    # Results have no shapes yet: -1 is no 1, so that each of their letters is split.
    shape = shape or (-1,) * len(axes)
    parts = zip(axes, shape, strict=True)
    return PartitionSpec(*(None if size == 1 else split.get(letter) or None for letter, size in parts))


BY_DEFAULT = Kernels()
