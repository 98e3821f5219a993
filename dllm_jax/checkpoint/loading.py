"""Loading a checkpoint as a `Model`, filled unit by unit on the device."""

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from dllm_jax.checkpoint.dtypes import choose
from dllm_jax.checkpoint.source import Source, open_checkpoint, stream
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params
from dllm_jax.nn.sharding import AXES, leaves, place, shape, sharding
from dllm_jax.nn.spec import ModelSpec
from pallas_kernels import Implementation


def load(
    path: str | os.PathLike[str],
    dtype: Any = None,
    mesh: Mesh | None = None,
    rope_factor: float = 1.0,
    check_finite: bool = False,
    implementation: Implementation | None = None,
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

    Returns:
      the model, `params` shaped like `dllm_jax.nn.parameters.abstract(spec, dtype)`.

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
    return dataclasses.replace(empty, params=fill(source, target, mesh, check_finite))


def scale_rope(spec: ModelSpec, factor: float) -> ModelSpec:
    """The spec with its rotary base multiplied by the factor (NTK scaling, LongLLaDA arXiv:2506.14429).

    Raises:
      ValueError: the factor is not a positive finite number.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"rope_factor={factor} must be positive and finite")
    return dataclasses.replace(spec, rope_base=spec.rope_base * factor)


def fill(source: Source, dtype: np.dtype, mesh: Mesh | None = None, check_finite: bool = False) -> Params:
    """Parameters of an opened checkpoint on the device or the mesh, layers stacked."""
    spec = source.spec
    stacked = tuple(leaf for leaf in leaves(spec) if AXES[leaf].startswith("n"))
    where = {leaf: None if mesh is None else sharding(spec, AXES[leaf], mesh) for leaf in stacked}
    shapes = tuple((leaf, shape(spec, AXES[leaf]), where[leaf]) for leaf in stacked)
    layers, lone = _zeros(shapes, dtype), {}
    for unit, arrays in stream(source, dtype, check_finite):
        placed = {entry.leaf: _place(spec, entry.leaf, arrays[entry.leaf], mesh) for entry in unit.entries}
        if unit.layer is None:
            lone |= placed
        else:
            layers = _set_layer(layers, placed, jnp.int32(unit.layer))
    return {"layers": layers, **lone}


def _place(spec: ModelSpec, leaf: str, array: np.ndarray, mesh: Mesh | None) -> jax.Array:
    axes = AXES[leaf].removeprefix("n")
    return place(array, None if mesh is None else sharding(spec, axes, mesh))


@functools.partial(jax.jit, static_argnames=("shapes", "dtype"))
def _zeros(
    shapes: tuple[tuple[str, tuple[int, ...], NamedSharding | None], ...], dtype: np.dtype
) -> dict[str, Array]:
    zeros = {leaf: jnp.zeros(size, dtype) for leaf, size, _ in shapes}
    return {
        leaf: zeros[leaf] if where is None else jax.lax.with_sharding_constraint(zeros[leaf], where)
        for leaf, _, where in shapes
    }


@functools.partial(jax.jit, donate_argnames="layers")  # in place: the stack is never held twice
def _set_layer(layers: dict[str, Array], new: dict[str, Array], layer: Int[Array, ""]) -> dict[str, Array]:
    return {leaf: jax.lax.dynamic_update_index_in_dim(layers[leaf], new[leaf], layer, 0) for leaf in layers}
