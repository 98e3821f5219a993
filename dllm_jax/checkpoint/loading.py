"""Loading a checkpoint as a `Model`, filled unit by unit on the device."""

import dataclasses
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dllm_jax.checkpoint.dtypes import choose
from dllm_jax.checkpoint.source import Source, open_checkpoint, stream
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params, separate_is_faster
from dllm_jax.nn.sharding import AXES, default_device, leaves, place, shape, sharding, stacked_format
from dllm_jax.nn.spec import ModelSpec
from pallas_kernels import Implementation


def load(
    path: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    rope_factor: float = 1.0,
    check_finite: bool = False,
    implementation: Implementation | None = None,
    separate_layers: bool | None = None,
) -> Model:
    """Loads a LLaDA or Dream checkpoint.

    No weights are ever initialised, and besides the model only one layer (or the embedding, or the head) is
    in memory at a time.

    Args:
      path: a Hugging Face directory (config.json, safetensors), one written by `convert`, or a hub id
        "org/name". Which one is told by its content.
      dtype: float32 or bfloat16; None keeps the stored one.
      mesh: shards heads, MLP width and vocabulary over its axis "tp", see `dllm_jax.nn.sharding`; None puts
        everything on the default device.
      rope_factor: multiplies the rotary base (NTK scaling, LongLLaDA arXiv:2506.14429).
      check_finite: look at every weight for NaN and infinity.
      implementation: of attention, see `Model`; "pallas" not with a mesh.
      separate_layers: each layer in arrays of its own (True) or all stacked (False), the two forms of
        `dllm_jax.nn.parameters`; None takes what the devices read faster: stacked on TPUs, separate
        elsewhere. Tokens do not depend on it.

    Returns:
      the model.

    Raises:
      FileNotFoundError: no such directory and no such hub id, or files are missing.
      ValueError: unsupported config or dtype, tensors missing, unmapped or misshaped, a damaged file,
        a factor that is not positive, an unknown implementation or kernels over a mesh, or (check_finite)
        tensors with NaN or infinity; each by name.
    """
    if mesh is not None and implementation == "pallas":
        raise ValueError("implementation='pallas' does not go with a mesh: XLA cannot split a kernel over it")
    source = open_checkpoint(path)
    empty = Model({}, scale_rope(source.spec, rope_factor), implementation)  # refuses before it reads
    target = choose(dtype, source.dtypes, str(source.path))
    return dataclasses.replace(empty, params=fill(source, target, mesh, check_finite, separate_layers))


def scale_rope(spec: ModelSpec, factor: float) -> ModelSpec:
    """The spec with its rotary base multiplied by the factor (NTK scaling, LongLLaDA arXiv:2506.14429).

    Raises:
      ValueError: the factor is not a positive finite number.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"rope_factor={factor} must be positive and finite")
    return dataclasses.replace(spec, rope_base=spec.rope_base * factor)


def fill(
    source: Source,
    dtype: np.dtype,
    mesh: Mesh | None = None,
    check_finite: bool = False,
    separate_layers: bool | None = None,
) -> Params:
    """Parameters of an opened checkpoint on the device or the mesh; arguments as of `load`."""
    platform = (default_device() if mesh is None else mesh.devices.flat[0]).platform
    if separate_layers is None:
        separate_layers = separate_is_faster(platform)
    layers = _List() if separate_layers else _Stack(source.spec, dtype, mesh, platform)
    lone: Params = {}
    for unit, arrays in stream(source, dtype, check_finite):
        placed = {
            entry.leaf: _place(source.spec, entry.leaf, arrays[entry.leaf], mesh) for entry in unit.entries
        }
        if unit.layer is None:
            lone |= placed
        else:
            layers.add(unit.layer, placed)
    return {"layers": layers.layers, **lone}


def _place(spec: ModelSpec, leaf: str, array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    axes = AXES[leaf].removeprefix("n")
    return place(array, None if mesh is None else sharding(spec, axes, mesh))


class _List:
    """Separate layers, in the order in which they are read."""

    def __init__(self):
        self.layers: list[dict[str, Array]] = []

    def add(self, index: int, new: dict[str, Array]):
        assert index == len(self.layers), "layers are read in order"
        self.layers.append(new)


class _Stack:
    """Stacked layers, which are filled in place: the stack is never held twice."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype, mesh: Mesh | None, platform: str):
        axes = {leaf: AXES[leaf] for leaf in leaves(spec) if AXES[leaf].startswith("n")}
        split = {leaf: None if mesh is None else sharding(spec, axes[leaf], mesh) for leaf in axes}
        where = {leaf: stacked_format(leaf, split[leaf], platform) for leaf in axes}
        empty = lambda: {leaf: jnp.zeros(shape(spec, axes[leaf]), dtype) for leaf in axes}
        self.layers: dict[str, Array] = jax.jit(empty, out_shardings=where)()
        self._set = jax.jit(_set_layer, donate_argnames="layers", out_shardings=where)

    def add(self, index: int, new: dict[str, Array]):
        self.layers = self._set(self.layers, new, jnp.int32(index))


def _set_layer(layers: dict[str, Array], new: dict[str, Array], layer: Int[Array, ""]) -> dict[str, Array]:
    return {leaf: jax.lax.dynamic_update_index_in_dim(layers[leaf], new[leaf], layer, 0) for leaf in layers}
