"""Device meshes: which of their axes split which axes of arrays, and how programs compute over them.

A mesh is the user's: its axes have any names and any order, all Auto or all Explicit. `MeshRules` says what
each axis is for. Programs name no axis of a mesh: they are written for whole arrays, constrain where a few of
them lie (`constrain`), and leave the rest to XLA's partitioner. Where axes are Explicit they are made Auto
inside (`over_mesh`), so that the same code runs on both, and results come back as Explicit arrays.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree, Shaped

from dllm_jax.options import Options
from dllm_jax.options.hints import warn
from dllm_jax.xla.partitioner import partitioned_over

AnyMesh = Mesh | AbstractMesh
TENSOR = ("tp", "model", "tensor")


class ReplicationWarning(UserWarning):
    """Something is held by several devices of a mesh that was meant to be split over them."""


@dataclasses.dataclass(frozen=True)
class MeshRules(Options):
    """Assigns mesh axes, by name, to the axes of arrays that they split.

    A name that a mesh does not have is passed over, so one table serves meshes of several conventions.
    Several axes of a mesh for one axis of arrays split it together. Heads, MLPs and width of a vision tower
    are split as the decoder's.

    Attributes:
      batch: Mesh axes that split the sequences of a batch (data parallelism).
      heads: Mesh axes that split query heads and the KV heads that they read (tensor parallelism).
      mlp: Mesh axes that split the width of the MLP and of each expert.
      vocab: Mesh axes that split the vocabulary, in embedding and head.
      width: Mesh axes that split the model width of parameters, but not of activations (fully sharded
        parameters). Programs gather them layer by layer. These axes usually split the batch too.
      experts: Mesh axes that split the experts of a layer (expert parallelism).
    """

    batch: tuple[str, ...] = ("dp", "data", "batch", "fsdp")
    heads: tuple[str, ...] = TENSOR
    mlp: tuple[str, ...] = TENSOR
    vocab: tuple[str, ...] = TENSOR
    width: tuple[str, ...] = ("fsdp",)
    experts: tuple[str, ...] = ("ep", "expert")

    def __post_init__(self):
        super().__post_init__()
        # One axis of a mesh cannot split two axes of one array.
        pairs = ("batch", "heads"), ("width", "heads"), ("width", "mlp"), ("width", "vocab")
        for name, other in (*pairs, *(("experts", other) for other in ("mlp", "width", "batch"))):
            if both := sorted(set(getattr(self, name)) & set(getattr(self, other))):
                raise ValueError(
                    f"MeshRules: mesh axes {both} are assigned to both {name} and {other}, but some arrays "
                    "have both. Use different mesh axes."
                )

    @property
    def known(self) -> tuple[str, ...]:
        """All names, in the order of the fields."""
        names = (name for field in dataclasses.fields(self) for name in getattr(self, field.name))
        return tuple(dict.fromkeys(names))

    def of(self, letter: str) -> tuple[str, ...]:
        """Names for an axis of arrays by its letter (`dllm_jax`, `dllm_jax.nn.sharding`), if it is split."""
        table = {"b": self.batch, "v": self.vocab, "e": self.experts}
        table |= dict.fromkeys("hkH", self.heads)  # capitals are the axes of a vision tower
        table |= dict.fromkeys("fijF", self.mlp) | dict.fromkeys("mM", self.width)
        return table.get(letter, ())

    def check(self, mesh: AnyMesh):
        """Refuses a mesh of unknown axes alone, and warns of an unknown axis of several devices.

        Raises:
          ValueError: none of the mesh's axes has a known name, or they are not all Auto or all Explicit.
        """
        check_axis_types(mesh)
        # A mesh of which nothing is known would run replicated everywhere, which is certainly a mistake; one
        # unknown axis among known ones may be meant, e.g. for a pipeline of the user's own.
        names = mesh.axis_names
        unknown = [name for name in names if name not in self.known]
        if names and len(unknown) == len(names):
            raise ValueError(
                f"mesh has the axes {list(names)}, of which none is known: expected some of "
                f"{list(self.known)}, or rules=dj.MeshRules(batch=..., heads=..., mlp=..., vocab=...)"
            )
        if replicated := [name for name in unknown if mesh.shape[name] > 1]:
            message = f"mesh axes {replicated} have no rule: everything is replicated over them"
            warn(message, ReplicationWarning)

    def axes(self, mesh: AnyMesh, letter: str, length: int | None = None) -> tuple[str, ...]:
        """The mesh's axes that split an axis of arrays, only as many of them as divide its `length`."""
        # In the order of the rules, and up to the first axis that does not divide: a later one would have to
        # skip it, and then the same name would split differently by the length at hand.
        chosen: tuple[str, ...] = ()
        for name in self.of(letter):
            if mesh.shape.get(name, 1) == 1:
                continue
            if length is not None and length % ways(mesh, (*chosen, name)):
                break
            chosen = (*chosen, name)
        return chosen

    def spec(self, mesh: AnyMesh, axes: str, lengths: Mapping[str, int]) -> PartitionSpec:
        """How an array lies on a mesh.

        Args:
          mesh: the mesh.
          axes: a letter per axis of the array; letters without a rule are not split.
          lengths: Length of each axis by letter. A missing one is assumed to divide.
        """
        split = (self.axes(mesh, letter, lengths.get(letter)) for letter in axes)
        return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in split))

    def of_results(self, arguments: PyTree, axes: str, **lengths: int) -> PartitionSpec:
        """How a result with these axes lies on the mesh of its program's arguments or of `jax.set_mesh`."""
        mesh = current_mesh(arguments)
        return PartitionSpec() if mesh is None else self.spec(mesh, axes, lengths)

    def batch_ways(self, mesh: AnyMesh | None) -> int:
        """Into how many parts a batch is split; 1 without a mesh."""
        return 1 if mesh is None else ways(mesh, self.axes(mesh, "b"))


def ways(mesh: AnyMesh, names: Iterable[str]) -> int:
    """Devices along these axes of a mesh."""
    return math.prod(mesh.shape[name] for name in names)


def check_axis_types(mesh: AnyMesh):
    """Raises ValueError if a mesh has Manual axes, or of several types, of which each needs own programs."""
    if len(set(mesh.axis_types)) > 1 or AxisType.Manual in mesh.axis_types:
        types = {name: kind.name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}
        raise ValueError(
            f"mesh has axes of the types {types}; expected all Auto or all Explicit. "
            f"Use jax.make_mesh({mesh.axis_sizes}, {mesh.axis_names})."
        )


def mesh_of(tree: PyTree) -> AnyMesh | None:
    """The mesh of several devices that arrays lie on, or that tracers and described arrays will lie on.

    Of concrete and described arrays it is the mesh they were put on, of traced ones its abstract form; None
    if there is none.
    """
    for leaf in jax.tree.leaves(tree):
        # A concrete array knows its devices; the type of a traced one names their mesh alone.
        placed = jax.typeof(leaf).sharding if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if isinstance(placed, NamedSharding) and not placed.mesh.empty and placed.mesh.size > 1:
            return placed.mesh
    return None


def context_mesh() -> AnyMesh | None:
    """The mesh of `jax.set_mesh`: concrete outside of traced programs, abstract inside; None without one."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty or abstract.size == 1:
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside of a traced program, where devices are not known
        return abstract


def current_mesh(tree: PyTree) -> AnyMesh | None:
    """The mesh of arrays, or that of `jax.set_mesh` where they are on none."""
    return mesh_of(tree) or context_mesh()


@contextlib.contextmanager
def number_modes() -> Iterator[None]:
    """The modes in which the library computes, whatever the user's program has chosen for its own arrays.

    Numbers of 32 bits and JAX's usual promotion of dtypes and ranks: results are bit for bit the same under
    `jax_enable_x64`, and with strict promotion.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@number_modes()
def over_mesh(function: Callable[..., Any], *args: PyTree, out: PyTree[PartitionSpec] | None) -> Any:
    """`function(*args)` inside of a traced program, with all axes of the mesh Auto while it runs.

    The body has the number types of `number_modes` too: all programs of the library are written for these.

    Args:
      function: computes on whole arrays, and may call `constrain`.
      *args: pytrees of arrays, of a mesh or of none.
      out: Shardings of the results, a tree or a prefix of one; results on Explicit axes have these types.
        None leaves them as the function constrains them, which Explicit axes do not allow.

    Raises:
      ValueError: `out` is None, and the mesh has Explicit axes; or they are not all Auto or all Explicit.
    """
    # The mesh of the context goes first: arguments that are on no mesh, such as constants, follow it.
    context = jax.sharding.get_abstract_mesh()
    mesh = mesh_of(args) if context.empty else context
    if mesh is None or mesh.size == 1:
        return function(*args)
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh

    # Inside of the user's shard_map each device is on its own: there is nothing to split.
    if abstract.manual_axes:
        return function(*args)
    check_axis_types(abstract)
    with jax.sharding.use_abstract_mesh(abstract):
        if out is None and abstract.explicit_axes:
            raise ValueError(
                f"the axes {abstract.explicit_axes} of the mesh are Explicit; expected Auto ones"
            )
        if out is None:
            return function(*args)
        if abstract.explicit_axes:
            # Array by array: JAX would rebuild arguments with types of arrays instead of arrays, which
            # no class of ours has to accept.
            leaves, structure = jax.tree.flatten(args)
            flat = lambda *leaves: function(*structure.unflatten(leaves))
            return jax.sharding.auto_axes(flat, out_sharding=out)(*leaves)
        # Auto axes: results are constrained to what was asked for; `out` may be a prefix of their tree.
        place = lambda spec, part: jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), part)
        return jax.tree.map(place, out, function(*args), is_leaf=lambda x: isinstance(x, PartitionSpec))


def constrain(x: Shaped[Array | np.ndarray, "..."], rules: MeshRules, axes: str) -> Shaped[Array, "..."]:
    """The array, split as the rules say; as it is where a program does not run `over_mesh`.

    Args:
      x: an array.
      rules: Sharding rules of the model.
      axes: One letter per axis (`MeshRules.spec`). Axes without a letter are not split.
    """
    mesh = partitioned_over()
    if mesh is None:
        return jnp.asarray(x)
    # Letters beyond the array's rank are dropped, so "bq" serves a vector by sequence as well.
    x, lengths = jnp.asarray(x), dict(zip(axes, x.shape, strict=False))
    return jax.lax.with_sharding_constraint(x, rules.spec(mesh, axes[: x.ndim], lengths))


def replicated(mesh: AnyMesh) -> Sharding:
    """The same array on every device of a mesh."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def gather_everywhere(mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """A program that gives every device, and so every process, the whole of arrays on a mesh."""
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))
