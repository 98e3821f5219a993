"""The interface of every kind of checkpoint, and reading one as a stream of units."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from dllm_jax.checkpoint.converted import is_converted, open_converted
from dllm_jax.checkpoint.hf import open_hf
from dllm_jax.checkpoint.locate import locate
from dllm_jax.checkpoint.names.table import Unit
from dllm_jax.nn.spec import ModelSpec


@runtime_checkable
class Source(Protocol):
    """A checkpoint that is read unit by unit."""

    @property
    def path(self) -> Path:
        """Its directory."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """The model it holds."""
        ...

    @property
    def units(self) -> tuple[Unit, ...]:
        """What can be read, in order."""
        ...

    @property
    def dtypes(self) -> set[np.dtype]:
        """Dtypes the weights are stored in."""
        ...

    def read(self, unit: Unit) -> dict[str, np.ndarray]:
        """Our parameters of one unit in the stored dtype."""
        ...


def open_checkpoint(path: str | os.PathLike[str]) -> Source:
    """Opens a Hugging Face directory, a converted one, or a hub id; reads no weights.

    Raises:
      FileNotFoundError, ValueError: see `locate`, `open_hf` and `open_converted`.
    """
    found = locate(path)
    return open_converted(found) if is_converted(found) else open_hf(found)


def stream(
    source: Source, dtype: np.dtype, check_finite: bool = False
) -> Iterator[tuple[Unit, dict[str, np.ndarray]]]:
    """Every unit in turn, cast to `dtype`; finally refuses NaN and infinity if `check_finite`.

    Raises:
      ValueError: (check_finite, after the last unit) naming all tensors with NaN or infinity.
    """
    bad = []
    for unit in source.units:
        arrays = {leaf: array.astype(dtype, copy=False) for leaf, array in source.read(unit).items()}
        if check_finite:
            bad += [entry.name for entry in unit.entries if not np.isfinite(arrays[entry.leaf]).all()]
        yield unit, arrays
    if bad:
        raise ValueError(f"{source.path}: NaN or infinite values in {', '.join(bad)}")
