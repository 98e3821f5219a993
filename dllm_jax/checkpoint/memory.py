"""A model in memory, read unit by unit like a checkpoint on disk."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from dllm_jax.checkpoint.families import family_of
from dllm_jax.checkpoint.names.table import Unit, units
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A model as a source of units."""

    model: Model

    @property
    def path(self) -> Path:
        """Its name in messages."""
        return Path("model")

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.model.spec

    @property
    def units(self) -> tuple[Unit, ...]:
        """What can be read, in order."""
        return units(self.spec, family_of(self.spec).names)

    @property
    def dtypes(self) -> set[np.dtype]:
        """Dtypes of the parameters."""
        return {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(self.model.params)}

    def read(self, unit: Unit) -> dict[str, np.ndarray]:
        """The parameters of one unit, fetched from the device."""
        params = self.model.params
        if unit.layer is None:
            return {entry.leaf: np.asarray(params[entry.leaf]) for entry in unit.entries}
        return {entry.leaf: np.asarray(params["layers"][entry.leaf][unit.layer]) for entry in unit.entries}
