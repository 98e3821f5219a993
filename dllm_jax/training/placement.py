"""Training on a mesh: which of its axes split the batch, the parameters and the optimizer's state.

`MeshRules` says what an axis is for, by its name; `dllm_jax.nn.sharding.AXES`, which axes a parameter has.
Sequences are split over data and fsdp axes together. Parameters, and what the optimizer keeps of them, are
split over tensor axes by heads, KV heads, MLP width or vocabulary, over expert axes by experts, and over fsdp
axes by the width of the model; a layer's are gathered over the latter when it runs, and again in its backward
pass.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.low_rank import factor_axes
from dllm_jax.nn.mask import Mask
from dllm_jax.nn.mesh import MeshRules, ways
from dllm_jax.nn.model import exact_layer
from dllm_jax.nn.parameters import Params, layer_in, name_of
from dllm_jax.nn.sharding import AXES, sharding, within_layer
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.training.batch import Checked


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh for training; hashable.

    Attributes:
      mesh: the user's, axes all Auto or all Explicit.
      rules: Sharding rules of the mesh.
    """

    mesh: Mesh
    rules: MeshRules = MeshRules()

    @property
    def automatic(self) -> Mesh:
        """The mesh that programs run on, with Auto axes: the compiler partitions the model."""
        axes = self.mesh.axis_names
        return Mesh(self.mesh.devices, axes, axis_types=(AxisType.Auto,) * len(axes))

    def returned(self, params: Params) -> Params:
        """Parameters on the user's mesh, where programs left them."""
        where = lambda leaf: NamedSharding(self.mesh, leaf.sharding.spec)
        return jax.device_put(params, jax.tree.map(where, params))

    @property
    def everywhere(self) -> NamedSharding:
        """A copy on every device."""
        return NamedSharding(self.automatic, PartitionSpec())

    @property
    def sequences(self) -> NamedSharding:
        """Arrays whose first axis is the batch."""
        return NamedSharding(self.automatic, self.rules.spec(self.mesh, "b", {}))

    def parameter(self, spec: ModelSpec, axes: str, gathered: bool = False) -> NamedSharding:
        """Sharding of an array with these axes, letters of `AXES`; whole along the width if `gathered`."""
        # A letter without a rule is not split.
        return sharding(spec, axes.replace("m", "-") if gathered else axes, self.automatic, self.rules)


def parameters(placement: Placement, spec: ModelSpec, params: Params) -> PyTree:
    """The sharding of every parameter; None stays None."""
    of = lambda path, _: placement.parameter(spec.at(layer_in(path)), _axes(path))
    return jax.tree_util.tree_map_with_path(of, params)


def _axes(path: tuple[Any, ...]) -> str:
    """The letters of the parameter, or of a part of a matrix with an update, at a path of a model's tree."""
    name = name_of(path)
    part = path[-1].name if isinstance(path[-1], jax.tree_util.GetAttrKey) else "base"
    axes = AXES[name] if part == "base" else factor_axes(name)["ab".index(part)]
    in_list = any(isinstance(key, jax.tree_util.SequenceKey) for key in path)
    return within_layer(axes) if in_list else axes


def moments(placement: Placement, params: PyTree, shardings: PyTree, state: PyTree) -> PyTree:
    """The sharding of the optimizer's state: where it mirrors the parameters, theirs; else a copy everywhere.

    Args:
      placement: the mesh.
      params: the trained parameters (or their shapes).
      shardings: Shardings of the trained parameters.
      state: the optimizer's state (or its shapes). An array mirrors the parameter of its shape at the end of
        its path, which is how the states of optax's transformations are built.
    """
    # Adam's mu and nu have the tree of the parameters inside of theirs: the ends of their paths are equal.
    leaves = jax.tree_util.tree_leaves_with_path(params)
    where = zip(leaves, jax.tree.leaves(shardings), strict=True)
    mirrored = {(_names(path), leaf.shape): sharding for (path, leaf), sharding in where}

    def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = _names(path)
        ends = ((names[i:], leaf.shape) for i in range(len(names)))
        return next((mirrored[end] for end in ends if end in mirrored), placement.everywhere)

    return jax.tree_util.tree_map_with_path(of, state)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def batch_on(placement: Placement, batch: Checked) -> Checked:
    """A batch on the mesh; of arrays of NumPy every process writes the part of its own devices."""
    split = placement.sequences

    def put(array: Any) -> Any:
        where = split if np.ndim(array) else placement.everywhere
        if isinstance(array, jax.Array):
            return jax.device_put(array, where)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(put, batch)


def layer_pass(
    placement: Placement,
    spec: ModelSpec,
    layer: Layer,
    x: Float[Array, "b l m"],
    position: Int[Array, "b l"],
    mask: Mask | None,
) -> Float[Array, "b l m"]:
    """`exact_layer` with sequences split, and the layer's weights gathered over fsdp while it runs."""
    keep = lambda x: jax.lax.with_sharding_constraint(x, placement.sequences)

    def run(weights: Mapping[str, Any], x: Float[Array, "b l m"]) -> Float[Array, "b l m"]:
        whole = gathered(placement, layer.spec, weights)
        return keep(exact_layer(dataclasses.replace(layer, weights=whole), keep(x), position, mask))

    # Where the model's width is split, the backward pass gathers a layer's weights again, or every device
    # would end up with all of them.
    if ways(placement.mesh, placement.rules.axes(placement.mesh, "m")) > 1:
        run = jax.checkpoint(run, policy=_all_but_gathered)
    return run(layer.weights, x)


def _all_but_gathered(primitive: Any, *_, **__) -> bool:
    """Keeps everything for the backward pass except gathered weights, which would fill every device."""
    return primitive.name != "sharding_constraint"


def gathered(placement: Placement, spec: ModelSpec, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a layer, or of none, gathered over fsdp; gradients are reduced and scattered again."""

    # Forward all-gather, backward reduce-scatter: the two constraints of `_gather`.
    def of(path: tuple[Any, ...], array: Array) -> Array:
        axes = within_layer(_axes(path))
        return _gather(placement.parameter(spec, axes), placement.parameter(spec, axes, gathered=True), array)

    return jax.tree_util.tree_map_with_path(of, dict(weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(split: NamedSharding, whole: NamedSharding, weight: Array) -> Array:
    return jax.lax.with_sharding_constraint(weight, whole)


_gather.defvjp(
    # Not `_gather` itself: the backward pass would keep what it returns, see `_all_but_gathered`.
    lambda split, whole, weight: (jax.lax.with_sharding_constraint(weight, whole), None),
    lambda split, whole, _, gradient: (jax.lax.with_sharding_constraint(gradient, split),),
)
