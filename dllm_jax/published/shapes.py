"""Models without weights: to ask what a program would take before there is hardware to run it on."""

import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dllm_jax.checkpoint.dtypes import choose, choose_weights
from dllm_jax.checkpoint.loading import evidence_for, usable_mesh
from dllm_jax.checkpoint.source import open_checkpoint
from dllm_jax.nn import parameters
from dllm_jax.nn.int8 import Weights, is_int8, placements
from dllm_jax.nn.mesh import MeshRules
from dllm_jax.nn.model import Model
from dllm_jax.nn.sharding import default_device, warn_of_replicas
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import check_argument, shown
from dllm_jax.published.presets import presets
from pallas_kernels import Choice


def abstract(
    shape: ModelSpec | str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    implementation: Choice = None,
    separate_layers: bool | None = None,
    weights: Weights | None = None,
    rules: MeshRules = MeshRules(),
) -> Model:
    """Describes the model that `load` would return, as shapes and placements; no array is read or allocated.

    `warmup` compiles for it. On the mesh of a described topology
    (`jax.experimental.topologies.get_topology_desc`) that needs no device; see
    docs/background/performance.md.

    Args:
      shape: a spec, the name of a published model ("llada-8b", "dream-7b"), or a checkpoint as in `load`.
      dtype: float32 or bfloat16; None is that of the checkpoint, and bfloat16 if there is none.
      mesh: Mesh to place the model on, or None (`load`); a mesh of one device is that device.
      implementation: Kernels to use, one name for all (`load`).
      separate_layers: Whether layers are separate arrays rather than stacked (`load`).
      weights: "int8" for int8 weight quantization (`load`).
      rules: Sharding rules of the mesh (`load`).

    Raises:
      FileNotFoundError, NotADirectoryError, ValueError: as `load`.
    """
    mesh = usable_mesh(mesh, rules)
    separate_layers = check_argument("separate_layers", separate_layers, bool | None)
    if not isinstance(shape, ModelSpec | str | os.PathLike):
        raise ValueError(f"shape={shown(shape)} must be a spec, the name of a model, or a checkpoint's path")
    if isinstance(shape, ModelSpec) or str(shape) in presets.names("models"):
        spec = shape if isinstance(shape, ModelSpec) else presets.model_spec(str(shape))

        # Published models are stored in bfloat16.
        target = choose(jnp.bfloat16 if dtype is None else dtype, set(), str(shape))
        form = choose_weights(weights, None, str(shape))
    else:
        try:
            source = open_checkpoint(shape)
        except FileNotFoundError as error:
            known = ", ".join(presets.names("models"))
            raise FileNotFoundError(f"{error}. Published models: {known}") from None
        spec, target = source.spec, choose(dtype, source.dtypes, str(source.path), source.matrices)
        form = choose_weights(weights, source.weights, str(source.path))

    warn_of_replicas(spec, mesh, rules)

    # The form and, array by array, the place that `load` chooses.
    platform = (default_device() if mesh is None else mesh.devices.flat[0]).platform
    separate_layers = parameters.form_of_layers(spec, separate_layers, platform)

    def placed(path: tuple[Any, ...], leaf: Any) -> Any:
        stacked = not separate_layers and path[0].key == "layers"
        where = placements(
            spec.at(parameters.layer_in(path)),
            path[-1].key,
            form,
            mesh,
            platform,
            stacked=stacked,
            rules=rules,
        )
        put = lambda array, at: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=at)
        return jax.tree.map(put, leaf, where)

    # Shapes as the checkpoint has them, in the form and at the places that `load` gives.
    formed = lambda tree: jax.eval_shape(parameters.separate, tree) if tree and separate_layers else tree
    put = lambda tree: jax.tree_util.tree_map_with_path(placed, formed(tree), is_leaf=is_int8)
    params, tower = parameters.abstract(spec, target, form), parameters.abstract_vision(spec, target)
    chosen = evidence_for(mesh) if implementation is None else implementation
    return Model(put(params), spec, chosen, rules, put(tower))
