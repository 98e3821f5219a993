"""Matrices in int8 with a scale for each output channel: half of bfloat16's bytes.

    w[i, o] = values[i, o] scale[o],   scale[o] = max_i |w[i, o]| / 127

Symmetric, to the nearest value, and of weights alone: a product converts the values to the dtype of the
activations, which is exact, as every integer up to 256 is a bfloat16; compilers do so while they read. The
matrices of the layers, each expert's too, those of DiffusionGemma's self-conditioning, and the vocabulary
head are int8 (`sharding.OUTPUTS`).
Embedding, routers, norms and biases keep the model's dtype; so does a table that embedding and head share.
"""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from dllm_jax.nn.mesh import MeshRules
from dllm_jax.nn.sharding import AXES, OUTPUTS, WIDE, format_on, shape, sharding, within_layer
from dllm_jax.nn.spec import ModelSpec

Weights = Literal["int8"]  # how matrices are held, if not in the model's dtype
LARGEST = 127  # -128 is not used: the range is symmetric
PIECE = 2**24  # scalars that are float32 at once while a matrix is quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Matrix:
    """A matrix in int8, in place of an array in the parameters.

    Besides arrays of devices or of the host, it may hold what describes them: shapes, axes, shardings.

    Attributes:
      values: int8 from -127 to 127, in the matrix's shape.
      scale: float32, positive, one per output channel: the axes of `OUTPUTS`.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.values.shape

    @property
    def size(self) -> int:
        """Number of the matrix's scalars."""
        return self.values.size

    @property
    def dtype(self) -> Any:
        """Dtype of the values, int8."""
        return self.values.dtype


HostArray = np.ndarray | Int8Matrix  # a parameter on the host


def is_int8(leaf: Any) -> bool:
    """Whether a parameter is an `Int8Matrix`; as `is_leaf`, trees of parameters end there."""
    return isinstance(leaf, Int8Matrix)


def held_as(params: PyTree) -> Weights | None:
    """How the matrices of these parameters are held: "int8", or None for the model's dtype."""
    return "int8" if any(map(is_int8, jax.tree.leaves(params, is_leaf=is_int8))) else None


def axes_of(leaf: str, weights: Weights | None) -> Any:
    """Axes of a parameter as in `AXES`; of one that is int8 an `Int8Matrix` of the axes of its two arrays."""
    axes = AXES[leaf]
    if weights is None or leaf not in OUTPUTS:
        return axes
    # w = values * scale holds per output, so x w = (x values) scale: the scale is applied once to the
    # product, after the sum over inputs, and never to the matrix.
    return Int8Matrix(axes, "n" * axes.startswith("n") + OUTPUTS[leaf])


def abstract_weights(spec: ModelSpec, leaf: str, dtype: Any, weights: Weights | None, stacked: bool) -> Any:
    """Shape and dtype of a parameter, an `Int8Matrix` of them if it is int8; arguments as of `placements`."""
    # A scale per output channel and, if stacked, per layer: its axes are the matrix's without those summed
    # over.
    axes = axes_of(leaf, weights)
    sized = lambda axes, dtype: jax.ShapeDtypeStruct(
        shape(spec, axes if stacked else within_layer(axes)), dtype
    )
    if not is_int8(axes):
        return sized(axes, np.float32 if leaf in WIDE else dtype)
    return Int8Matrix(sized(axes.values, np.int8), sized(axes.scale, np.float32))


def placements(
    spec: ModelSpec,
    leaf: str,
    weights: Weights | None,
    mesh: Mesh | None,
    platform: str,
    stacked: bool,
    rules: MeshRules = MeshRules(),
) -> Any:
    """Where a parameter lies: a sharding, None without a mesh; of an int8 matrix, those of both arrays.

    Args:
      spec: the model.
      leaf: a key of `AXES`.
      weights: Form of the matrices.
      mesh: None puts everything on the default device.
      platform: Platform of the devices, such as "cpu".
      stacked: whether the parameter is one of stacked layers.
      rules: Sharding rules of the mesh.
    """

    def where(axes: str) -> Any:
        # Only the values have an order of axes of their own on TPUs; scales lie as JAX puts them.
        inner = axes if stacked else within_layer(axes)
        split = None if mesh is None else sharding(spec, inner, mesh, rules)
        return format_on(platform, spec, leaf, split, stacked) if axes == AXES[leaf] else split

    return jax.tree.map(where, axes_of(leaf, weights))


def quantize(array: Float[np.ndarray, "..."], axes: str, outputs: str) -> Int8Matrix:
    """The nearest int8 matrix of an array on the host, computed in float32, bounded in memory.

    Halves go to the even neighbor. A channel of zeros has the scale 1, and so has one of numbers so small
    that its scale would not be a normal float32: these become zeros.

    Args:
      array: the matrix; any strides.
      axes: its axes, a letter each.
      outputs: those of them that are output channels, in the same order.

    Raises:
      ValueError: NaN or infinity, for which there is no scale.
    """
    # A piece is a range of the first output axis, so that it has its channels to itself.
    first, inputs = axes.index(outputs[0]), tuple(i for i, axis in enumerate(axes) if axis not in outputs)
    values = np.empty_like(array, np.int8)
    scale = np.empty([array.shape[axes.index(axis)] for axis in outputs], np.float32)
    step = max(1, PIECE * array.shape[first] // max(array.size, 1))
    for start in range(0, array.shape[first], step):
        piece = (slice(None),) * first + (slice(start, start + step),)
        # Symmetric, round to nearest: scale = max |w| / 127 of each channel, so its largest weight
        # becomes 127 or -127.
        wide = array[piece].astype(np.float32)
        largest = np.abs(wide).max(axis=inputs, keepdims=True)
        if not np.isfinite(largest).all():
            raise ValueError("NaN or infinite values, for which int8 has no scale,")
        divisor = largest / np.float32(LARGEST)
        # A subnormal scale would be flushed to zero on accelerators, and 0 / 0 is NaN.
        divisor[divisor < np.finfo(np.float32).tiny] = 1
        values[piece] = np.rint(wide / divisor)
        scale[start : start + step] = divisor.squeeze(inputs)
    return Int8Matrix(values, scale)


def dequantize(
    matrix: Int8Matrix, axes: str, outputs: str, piece: slice = slice(None)
) -> Float[np.ndarray, "..."]:
    """The float32 array that an int8 matrix on the host stands for, or a `piece` along its first axis.

    Other arguments as of `quantize`.
    """
    # The scale with an axis of length 1 for every input, so that it broadcasts against the values.
    inputs = tuple(i for i, axis in enumerate(axes) if axis not in outputs)
    scale = np.expand_dims(matrix.scale, inputs)
    return matrix.values[piece].astype(np.float32) * (scale[piece] if axes[0] in outputs else scale)
