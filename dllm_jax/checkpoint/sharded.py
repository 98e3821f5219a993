"""Sharded loading: parameters where they are stored, of which a process reads what its own devices hold."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.names.table import Unit, own_axes
from dllm_jax.nn.int8 import HostArray, Int8Matrix, Weights, quantize
from dllm_jax.nn.sharding import OUTPUTS, WIDE
from dllm_jax.nn.spec import ModelSpec

Ranges = tuple[slice, ...]  # a part of an array: start and stop along each of its axes


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array where it is stored.

    Attributes:
      shape: Shape of the whole array, in our layout.
      dtype: Dtype in which it is read.
      read: reads one part of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Ranges], np.ndarray]

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.read(tuple(slice(0, length) for length in self.shape))

    def on_devices(self, where: Sharding | None) -> jax.Array:
        """The array on the default device, or on those of a sharding.

        Each part that devices of this process hold is read once, however many of them hold it.
        """
        if where is None:
            return jax.device_put(self.whole())
        # Devices that hold the same part, as along a data axis, share one read.
        parts: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def part(index: Ranges | None) -> np.ndarray:
            assert index is not None, "a device that is asked for holds a part"
            key = tuple(s.indices(length)[:2] for s, length in zip(index, self.shape, strict=True))
            if key not in parts:
                parts[key] = self.read(tuple(slice(*ends) for ends in key))
            return parts[key]

        return jax.make_array_from_callback(self.shape, where, part, dtype=self.dtype)


StoredParameter = Stored | Int8Matrix  # of an int8 matrix, two stored arrays


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint, or a model in memory, read unit by unit; `units_of(spec, family)` are the units.

    Attributes:
      path: the directory, which error messages name.
      spec: the model.
      dtypes: that weights are stored in.
      weights: Form of stored matrices: "int8", or None for one of `dtypes`.
      parameters: the parameters of one unit by name, in our layout and the stored dtype, none of them read
        yet. What cannot be read raises ValueError, at once or when it is.
      matrices: Dtype of most numbers in stored matrices; None where `dtypes` are all that is known.
      quantized: How stored weights are quantized, in words; they are read dequantized.
      family: Layout of one's own that it is stored in; None looks up `ModelSpec.family`.
      carried: Tensors that no parameter is made of, which are written as they are (`Family.carried`).
    """

    path: Path
    spec: ModelSpec
    dtypes: frozenset[np.dtype]
    weights: Weights | None
    parameters: Callable[[Unit], dict[str, StoredParameter]]
    matrices: np.dtype | None = None
    quantized: str | None = None
    family: Family | None = None
    carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def whole_array(parameters: dict[str, StoredParameter]) -> dict[str, HostArray]:
    """All of some parameters, on the host."""
    return jax.tree.map(Stored.whole, parameters)


def held(
    stored: StoredParameter, leaf: str, dtype: np.dtype, weights: Weights | None, where: str
) -> StoredParameter:
    """A stored parameter as a model holds it; parts are changed as they are read.

    Args:
      stored: Stored array; an int8 matrix stays one.
      leaf: its name, a key of `dllm_jax.nn.sharding.AXES`.
      dtype: Dtype of all arrays but int8 matrices and those that keep their own (`WIDE`).
      weights: "int8" makes int8 of matrices, from the stored numbers.
      where: tensor and checkpoint, for messages.

    Raises:
      ValueError: when it is read, a matrix with NaN or infinity, which cannot be int8.
    """
    if isinstance(stored, Int8Matrix) or leaf in WIDE:
        return stored
    if weights == "int8" and leaf in OUTPUTS:
        return _quantized(stored, own_axes(leaf), OUTPUTS[leaf], where)
    return Stored(stored.shape, dtype, lambda ranges: stored.read(ranges).astype(dtype, copy=False))


def _quantized(stored: Stored, axes: str, outputs: str, where: str) -> Int8Matrix:
    """The int8 matrix of a stored one: a part of its channels is read with all that these sum over."""
    # A scale is the largest number of an output channel: all inputs of a channel must be read for it.
    of_outputs = [axes.index(axis) for axis in outputs]

    @functools.cache  # values and scale are read one after the other
    def channels(ends: tuple[tuple[int, int], ...]) -> Int8Matrix:
        ranges = [slice(0, length) for length in stored.shape]
        for axis, (start, stop) in zip(of_outputs, ends, strict=True):
            ranges[axis] = slice(start, stop)
        try:
            return quantize(stored.read(tuple(ranges)), axes, outputs)
        except ValueError as error:
            raise ValueError(f"{error} in {where}") from error

    def values(ranges: Ranges) -> np.ndarray:
        # Channels are cut as they are read, with all of their inputs; of these, a device's part is cut here.
        ends = tuple((ranges[axis].start, ranges[axis].stop) for axis in of_outputs)
        inner = tuple(slice(None) if axis in of_outputs else part for axis, part in enumerate(ranges))
        return channels(ends).values[inner]

    def scale(ranges: Ranges) -> np.ndarray:
        return channels(tuple((part.start, part.stop) for part in ranges)).scale

    shape = tuple(stored.shape[axis] for axis in of_outputs)
    return Int8Matrix(
        Stored(stored.shape, np.dtype(np.int8), values), Stored(shape, np.dtype(np.float32), scale)
    )
