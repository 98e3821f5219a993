"""The converted directory: one small Orbax checkpoint per unit, and spec.json.

    spec.json         format number, dtype and the fields of ModelSpec; "weights": "int8" in format 2
    provenance.json   what it was made from
    params/UNIT/      Orbax: parameters of the embedding, a layer, the norm or the head, in our layout
    config.json, tokenizer files, ...  kept as they came

Format 2 is that of int8 matrices: such a parameter is two arrays, values and scale (`dllm_jax.nn.int8`), and
dtype is that of all others. What has none is written in format 1, which earlier releases read as well.
Units rather than one checkpoint because Orbax takes a whole tree at once, and a whole model must not be in
memory at once.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_leaves_with_path

from dllm_jax.checkpoint.config import read_config
from dllm_jax.checkpoint.directory import check_tree
from dllm_jax.checkpoint.dtypes import supported
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.names.table import Unit
from dllm_jax.nn.int8 import HostArray, Int8Matrix, Weights
from dllm_jax.nn.spec import ModelSpec

SPEC = "spec.json"
PARAMS = "params"
FORMATS: dict[int, Weights | None] = {1: None, 2: "int8"}  # and how they hold matrices
PIECE = 64 * 2**20


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

    def read(self, unit: Unit) -> dict[str, HostArray]:
        """The parameters of one unit.

        Raises:
          ValueError: damaged, other names, shapes or dtypes than spec.json describes, or scales that no
            conversion writes.
        """
        where = self.path / PARAMS / unit.name
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                arrays = checkpointer.restore(where.absolute(), args=ocp.args.PyTreeRestore())
            except (ValueError, OSError, KeyError) as error:
                raise ValueError(f"{where} cannot be read: {error}") from error
        described = _as_stored(unit.arrays(self.spec, self.dtype, self.weights))
        expected, found = (
            {keystr(at, simple=True, separator="/"): (array.shape, str(array.dtype)) for at, array in leaves}
            for leaves in map(tree_leaves_with_path, (described, arrays))
        )
        if found != expected:
            raise ValueError(f"{where} holds {found}, but {SPEC} describes {expected}")
        return {leaf: _as_read(f"{where}: {leaf}", array) for leaf, array in arrays.items()}


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
        supported_ones = " and ".join(map(str, FORMATS))
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
    check_tree(path, PARAMS)
    return ConvertedCheckpoint(path, spec, supported(written.get("dtype")), weights)


def write_spec(path: Path, spec: ModelSpec, dtype: np.dtype, weights: Weights | None):
    """Writes spec.json."""
    (version,) = (number for number, held in FORMATS.items() if held == weights)
    content: dict[str, Any] = {"format": version, "dtype": str(dtype)}
    content |= {} if weights is None else {"weights": weights}
    content |= {"spec": dataclasses.asdict(spec)}
    (path / SPEC).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_unit(path: Path, unit: Unit, arrays: dict[str, HostArray]):
    """Writes the parameters of one unit, in our layout."""
    contiguous = jax.tree.map(np.ascontiguousarray, _as_stored(arrays))
    # Compressed and buffered in pieces: whole arrays and files of Orbax's default size would need about
    # the unit's size in memory once more, both on writing and on reading.
    pieces = jax.tree.map(lambda array: ocp.SaveArgs(chunk_byte_size=PIECE), contiguous)
    args = ocp.args.PyTreeSave(contiguous, save_args=pieces, ocdbt_target_data_file_size=PIECE)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((path / PARAMS / unit.name).absolute(), args=args)


def _as_stored(arrays: dict[str, Any]) -> dict[str, Any]:
    """An int8 matrix as Orbax keeps it: a dictionary of its two arrays."""
    parts = lambda array: {"values": array.values, "scale": array.scale}
    return {leaf: parts(array) if isinstance(array, Int8Matrix) else array for leaf, array in arrays.items()}


def _as_read(where: str, array: Any) -> HostArray:
    """The inverse of `_as_stored` for one parameter.

    Raises:
      ValueError: an int8 matrix has a scale that is not positive and finite.
    """
    if not isinstance(array, dict):
        return np.asarray(array)
    scale = np.asarray(array["scale"])
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError(f"{where}/scale holds numbers that are not positive and finite")
    return Int8Matrix(np.asarray(array["values"]), scale)
