"""The parameters as a pytree. `dllm_jax.nn.modules` makes it with Flax (nnx), by `dllm_jax.nn.sharding.AXES`.

Everything else in the package works on the pure pytree that those modules describe:

    {"embed": [v m], "layers": {name: [n ...]}, "norm": [m], "head": [v m] unless tied}

That is the stacked form, which one scan runs through: short programs, and on TPUs each product reads its
layer's part of the stack. GPUs and CPUs first copy that part out of the stack, 3 times the traffic of the
product itself. For them `separate` gives "layers" as a list of {name: [...]}, which programs run in turn.
Everything that takes parameters takes both forms. In either, matrices may be int8 (`dllm_jax.nn.int8`).
Layers with experts are a list on TPUs too, whose ragged product would copy all of a layer's experts out of a
stack; those of which some have experts and others an MLP, and Gemma's of two kinds, do not stack at all. The
layers of other small models (`is_small`) are stacked everywhere: their copies take microseconds, and one
layer compiles faster than many.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from dllm_jax.nn import int8, sharding
from dllm_jax.nn.int8 import Weights, is_int8
from dllm_jax.nn.low_rank import adapted, is_low_rank
from dllm_jax.nn.sharding import AXES, VISION, shape
from dllm_jax.nn.spec import ModelSpec

Params = dict[str, Any]


def abstract(
    spec: ModelSpec, dtype: Any = jnp.float32, weights: Weights | None = None
) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the parameters without allocating any; what a loader has to fill."""
    stacked = not spec.layers_differ
    described = lambda path, leaf: int8.abstract_weights(
        spec.at(layer_in(path)), path[-1].key, leaf.dtype, weights, stacked
    )
    return jax.tree_util.tree_map_with_path(described, _of_modules(spec, jnp.dtype(dtype)))


def layer_in(path: tuple[Any, ...]) -> int | None:
    """The number of the separate layer that a path of the parameters leads into; None of any other."""
    return next((key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey)), None)


@functools.cache
def _of_modules(spec: ModelSpec, dtype: np.dtype) -> PyTree[jax.ShapeDtypeStruct]:
    from dllm_jax.nn.modules import initialize  # Flax is slow to import

    # By a trace of the modules, which make them by the table of axes (`dllm_jax.nn.sharding`).
    return jax.eval_shape(lambda: initialize(spec, jax.random.key(0), dtype))


def abstract_vision(spec: ModelSpec, dtype: Any = jnp.float32) -> Params | None:
    """Shapes and dtypes of a tower and its projector (`Model.vision`), stacked; None of text models."""
    if spec.vision is None:
        return None
    sized = {leaf: jax.ShapeDtypeStruct(shape(spec, AXES[leaf]), dtype) for leaf in VISION}
    stacked = {leaf: sized.pop(leaf) for leaf in VISION if AXES[leaf].startswith("N")}
    return {"layers": stacked, **sized}


def separate(params: Params) -> Params:
    """The same parameters with a list of layers; those of a list are returned as they are."""
    layers = params["layers"]
    if isinstance(layers, list):
        return params
    # Slices of the stacks are copies: until the stacked parameters are let go, both exist.
    return params | {"layers": [layer_of(params, i) for i in range(_count(layers))]}


def stacked(params: Params) -> Params:
    """The same parameters with stacked layers; stacked ones are returned as they are.

    Raises:
      ValueError: layers have different parameters, such as experts in some and an MLP in others.
    """
    layers = params["layers"]
    if not isinstance(layers, list):
        return params
    if any(layer.keys() != layers[0].keys() for layer in layers):
        raise ValueError("layers with different parameters, such as experts in some, do not stack")
    return params | {"layers": jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)}


def layer_of(params: Params, index: int) -> dict[str, Any]:
    """One layer's parameters, of either form."""
    layers = params["layers"]
    return layers[index] if isinstance(layers, list) else jax.tree.map(lambda a: a[index], layers)


def is_small(spec: ModelSpec) -> bool:
    """Whether a model's steps take so little time that a program should rather be short to compile.

    At 2 million scalars, 8 MiB in float32, the copies of stacked layers cost a CPU about a millisecond per
    step, and each additional step width costs it a second or more of compilation.
    """
    of_layers = (AXES[leaf] for leaf in sharding.leaves(spec) if AXES[leaf].startswith("n"))
    return sum(math.prod(shape(spec, axes)) for axes in of_layers) <= 2 << 20


def separate_is_faster(spec: ModelSpec, platform: str) -> bool:
    """Whether a platform's programs run the model faster from separate layers: see above."""
    return not is_small(spec) and (spec.experts is not None or platform != "tpu")


def form_of_layers(spec: ModelSpec, separate_layers: bool | None, platform: str) -> bool:
    """Whether a model's layers are to be separate: as asked for, or as its devices read them faster.

    Raises:
      ValueError: stacked layers are asked for, and the model's differ.
    """
    if separate_layers is False and spec.layers_differ:
        raise ValueError(
            f"separate_layers=False must be None or True for {spec.family}: its layers have different "
            "parameters, and do not stack"
        )
    if separate_layers is None:
        return spec.layers_differ or separate_is_faster(spec, platform)
    return separate_layers


def _count(layers: dict[str, Any]) -> int:
    return next(iter(layers.values())).shape[0]


def count(params: PyTree[Array | jax.ShapeDtypeStruct]) -> int:
    """Number of scalars in a parameter tree; scales of int8 matrices are not counted."""
    return sum(leaf.size for leaf in jax.tree.leaves(params, is_leaf=is_int8))


def describe(params: Any) -> list[str]:
    """The parameters for people: sizes and dtypes, a line per group with its shapes, and a line of the mesh.

    Args:
      params: arrays, traced ones, or `ShapeDtypeStruct`s; anything else in their place is written as it is.
    """
    if not isinstance(params, dict):
        return [f"params={params!r}"]
    # Leaves by their own names; of a loader's tree some may not be arrays yet.
    paths = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_int8)
    leaves = [(jax.tree_util.keystr(path[-1:], simple=True), leaf) for path, leaf in paths]
    arrays = [leaf for _, leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    dtypes = ", ".join(sorted({str(array.dtype) for array in arrays})) or "no dtype"
    # A line per group, in the order of the computation.
    lines = [f"{sum(array.size for array in arrays):,} parameters, {dtypes}"]
    for name in _ordered(params, ("embed", "layers", "norm", "head")):
        group = params[name]
        if isinstance(group, list):
            shapes = f"{len(group)} x ({_shapes(group[0]) if group else ''})"
        elif isinstance(group, dict):
            shapes = _shapes(group)
        else:
            shapes = _shape(group)
        lines.append(f"{name:<7} {shapes}")
    ranks = ", ".join(sorted({f"rank {m.rank}, alpha {m.alpha:g}" for m in adapted(params)}))
    kinds = ("int8", is_int8, "a float32 scale per output channel"), ("LoRA", is_low_rank, ranks)
    for title, is_kind, what in kinds:
        marked = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_kind)
        if names := dict.fromkeys(name_of(path) for path, leaf in marked if is_kind(leaf)):
            lines.append(f"{title:<8}{', '.join(_ordered(names, tuple(AXES)))}; {what}")
    return lines + _mesh_line(leaves)


def name_of(path: tuple[Any, ...]) -> str:
    """The parameter's name in a path that may go on into the parts of a matrix."""
    return [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]


def _ordered(group: dict[str, Any], known: tuple[str, ...]) -> list[str]:
    """The names of a group in the order of the computation, unknown ones last."""
    return sorted(group, key=lambda name: known.index(name) if name in known else len(known))


def _shapes(group: dict[str, Any]) -> str:
    return ", ".join(f"{leaf} {_shape(group[leaf])}" for leaf in _ordered(group, tuple(AXES)))


def _shape(array: Any) -> str:
    return f"[{' '.join(map(str, array.shape))}]" if hasattr(array, "shape") else repr(array)


def _mesh_line(leaves: list[tuple[str, Any]]) -> list[str]:
    """The mesh that parameters are placed on, and which are split over it; nothing on a single device."""
    # A traced array has no placement of its own, and refuses the question.
    arrays = [(n, leaf.values if is_int8(leaf) else leaf) for n, leaf in leaves]
    placed = [(n, getattr(x, "sharding", None)) for n, x in arrays if not isinstance(x, Tracer)]
    meshes = {s.mesh.shape_tuple for _, s in placed if isinstance(s, NamedSharding)}
    if not meshes:
        return []
    split = [n for n, s in placed if isinstance(s, NamedSharding) and not s.is_fully_replicated]
    axes = "; ".join(", ".join(f"{axis}={size}" for axis, size in mesh) for mesh in sorted(meshes))
    return [f"mesh    {axes}; split over it: {', '.join(split) or 'nothing'}"]
