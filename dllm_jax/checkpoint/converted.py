"""The converted directory: the arrays of each unit in a directory of their own, and spec.json.

    spec.json         format number, dtype and the fields of ModelSpec; "weights": "int8" in formats 2 and 4
    provenance.json   what it was made from
    params/UNIT/      parameters of the embedding, a layer, the norm or the head, in our layout
    config.json, tokenizer files, ...  kept as they came

Formats 2 and 4 are those of int8 matrices: such a parameter is two arrays, LEAF.values and LEAF.scale
(`dllm_jax.nn.int8`), and dtype is that of all others. Formats 1 and 2 are Orbax checkpoints of earlier
releases, cut by size; 3 and 4 are cut where meshes split them (`dllm_jax.checkpoint.arrays`). All are read
alike, and a whole model is never in memory at once.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.checkpoint.arrays import names, open_array, write
from dllm_jax.checkpoint.config import read_config
from dllm_jax.checkpoint.dtypes import supported
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.names.table import Unit
from dllm_jax.checkpoint.stored import Ranges, Stored, StoredParameter
from dllm_jax.nn.int8 import HostArray, Int8Matrix, Weights, axes_of, is_int8
from dllm_jax.nn.spec import ModelSpec

SPEC = "spec.json"
PARAMS = "params"
FORMATS: dict[int, Weights | None] = {1: None, 2: "int8", 3: None, 4: "int8"}  # and how they hold matrices
WRITTEN: dict[Weights | None, int] = {None: 3, "int8": 4}


@dataclasses.dataclass(frozen=True)
class ConvertedCheckpoint:
    """An opened converted directory.

    Attributes:
      path: the directory.
      spec: what it holds.
      dtype: of all parameters but int8 matrices.
      weights: how matrices are stored, "int8" or None for `dtype`.
    """

    path: Path
    spec: ModelSpec
    dtype: np.dtype
    weights: Weights | None

    @property
    def dtypes(self) -> set[np.dtype]:
        """The one dtype besides int8, as a set."""
        return {self.dtype}

    def parameters(self, unit: Unit) -> dict[str, StoredParameter]:
        """The parameters of one unit, none of them read yet.

        Raises:
          ValueError: damaged, other names, shapes or dtypes than spec.json describes, or, when they are read,
            scales that no conversion writes.
        """
        where = self.path / PARAMS / unit.name
        arrays = {name: open_array(where, name) for name in names(where)}
        described = unit.arrays(self.spec, self.dtype, self.weights)
        found = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
        expected = {
            name: (array.shape, str(array.dtype))
            for leaf, parameter in described.items()
            for name, array in _named(leaf, parameter).items()
        }
        if found != expected:
            raise ValueError(f"{where} holds {found}, but {SPEC} describes {expected}")
        return {leaf: _as_parameter(where, leaf, arrays) for leaf in described}


def is_converted(path: Path) -> bool:
    """Whether a directory is a converted one, by its content."""
    return (path / SPEC).is_file() and (path / PARAMS).is_dir()


def open_converted(path: Path) -> ConvertedCheckpoint:
    """Opens a converted directory and checks that it is complete; reads no weights.

    Raises:
      ValueError: spec.json is of another format or damaged, or units are missing.
    """
    written = read_config(path / SPEC).values
    version, weights = written.get("format"), written.get("weights")
    if version not in FORMATS:
        supported_ones = ", ".join(map(str, FORMATS))
        raise ValueError(f"{path / SPEC}: format={version!r} is not supported; supported: {supported_ones}")
    if weights != FORMATS[version]:
        raise ValueError(
            f"{path / SPEC}: weights={weights!r} does not belong to format {version}, "
            f"whose weights are {FORMATS[version]!r}"
        )
    fields = written.get("spec")
    names = {field.name for field in dataclasses.fields(ModelSpec)}
    if not isinstance(fields, dict) or set(fields) != names:
        wrong = sorted(set(fields or ()) ^ names)
        raise ValueError(f"{path / SPEC}: spec has wrong or missing fields {wrong}")
    try:
        spec = ModelSpec(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path / SPEC}: {error}") from error
    missing = [u.name for u in units_of(spec) if not (path / PARAMS / u.name).is_dir()]
    if missing:
        raise ValueError(f"{path / PARAMS} lacks {', '.join(missing)}")
    return ConvertedCheckpoint(path, spec, supported(written.get("dtype")), weights)


def write_spec(path: Path, spec: ModelSpec, dtype: np.dtype, weights: Weights | None):
    """Writes spec.json."""
    content: dict[str, Any] = {"format": WRITTEN[weights], "dtype": str(dtype)}
    content |= {} if weights is None else {"weights": weights}
    content |= {"spec": dataclasses.asdict(spec)}
    (path / SPEC).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_unit(path: Path, unit: Unit, parameters: dict[str, HostArray]):
    """Writes the parameters of one unit, in our layout."""
    arrays: dict[str, tuple[str, np.ndarray]] = {}
    for leaf, parameter in parameters.items():
        axes = _named(leaf, axes_of(leaf, "int8" if is_int8(parameter) else None))
        for name, array in _named(leaf, parameter).items():
            arrays[name] = axes[name].removeprefix("n"), array
    write(path / PARAMS / unit.name, arrays)


def _named(leaf: str, parameter: Any) -> dict[str, Any]:
    """A parameter's arrays, or what describes them, by their names: an int8 matrix is two."""
    if not is_int8(parameter):
        return {leaf: parameter}
    return {f"{leaf}.values": parameter.values, f"{leaf}.scale": parameter.scale}


def _as_parameter(where: Path, leaf: str, arrays: dict[str, Stored]) -> StoredParameter:
    """The inverse of `_named`, whose scales are looked at when they are read."""
    if leaf in arrays:
        return arrays[leaf]
    scale = arrays[f"{leaf}.scale"]

    def read(ranges: Ranges) -> np.ndarray:
        part = scale.read(ranges)
        if not (np.isfinite(part) & (part > 0)).all():
            raise ValueError(f"{where}: {leaf}.scale holds numbers that are not positive and finite")
        return part

    return Int8Matrix(arrays[f"{leaf}.values"], dataclasses.replace(scale, read=read))
