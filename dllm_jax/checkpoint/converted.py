"""The converted directory: one small Orbax checkpoint per unit, and spec.json.

    spec.json         format number, dtype and the fields of ModelSpec; "weights": "int8" in format 2
    provenance.json   what it was made from, and hashes of what was written
    params/UNIT/      Orbax: parameters of the embedding, a layer, the norm or the head, in our layout
    config.json, tokenizer files, ...  kept as they came

Format 2 is that of int8 matrices: such a parameter is two arrays, values and scale (`dllm_jax.nn.int8`), and
dtype is that of all others. What has none is written in format 1, which earlier releases read as well.
Units rather than one checkpoint because Orbax takes a whole tree at once, and a whole model must not be in
memory at once.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import keystr, tree_leaves_with_path

from dllm_jax.checkpoint.directory import check_tree
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.names.table import Unit
from dllm_jax.checkpoint.orbax_errors import reading, writing
from dllm_jax.checkpoint.spec_file import SPEC, read_spec
from dllm_jax.checkpoint.unit_metadata import check_names, check_unit, entries, named
from dllm_jax.nn.int8 import HostArray, Int8Matrix, Weights
from dllm_jax.nn.spec import ModelSpec

PARAMS = "params"
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
        with reading(where), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arrays = checkpointer.restore(where.absolute(), args=ocp.args.PyTreeRestore())
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
    """Opens a converted directory and checks that it is complete and fits its spec.json; reads no weights.

    Raises:
      ValueError: spec.json is of another format or damaged, or the units are not exactly those that it
        describes, by name.
    """
    spec, dtype, weights = read_spec(path)
    params = path / PARAMS
    if spec.layers > len(entries(params)):  # before a list of that many layers is made
        raise ValueError(
            f"{path / SPEC}: layers={spec.layers}, but {params} lacks units for that many layers"
        )
    units = units_of(spec)
    check_names(params, [unit.name for unit in units], SPEC)
    check_tree(path, PARAMS)
    for unit in units:
        check_unit(params / unit.name, _as_stored(unit.arrays(spec, dtype, weights)), SPEC)
    return ConvertedCheckpoint(path, spec, dtype, weights)


def write_unit(path: Path, unit: Unit, arrays: dict[str, HostArray]):
    """Writes the parameters of one unit, in our layout."""
    contiguous = jax.tree.map(np.ascontiguousarray, _as_stored(arrays))
    # Compressed and buffered in pieces: whole arrays and files of Orbax's default size would need about
    # the unit's size in memory once more, both on writing and on reading.
    pieces = jax.tree.map(lambda array: ocp.SaveArgs(chunk_byte_size=PIECE), contiguous)
    args = ocp.args.PyTreeSave(
        contiguous, save_args=pieces, ocdbt_target_data_file_size=PIECE, custom_metadata=named(unit.name)
    )
    where = (path / PARAMS / unit.name).absolute()
    with writing(where), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(where, args=args)


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
