"""The converted directory: one small Orbax checkpoint per unit, and spec.json.

    spec.json         format number, dtype and the fields of ModelSpec
    provenance.json   what it was made from
    params/UNIT/      Orbax: parameters of the embedding, a layer, the norm or the head, in our layout
    config.json, tokenizer files, ...  kept as they came

Units rather than one checkpoint because Orbax takes a whole tree at once, and a whole model must not be in
memory at once.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from dllm_jax.checkpoint.config import read_config
from dllm_jax.checkpoint.dtypes import supported
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.names.table import Unit
from dllm_jax.nn.spec import ModelSpec

SPEC = "spec.json"
PARAMS = "params"
FORMAT = 1
PIECE = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class ConvertedCheckpoint:
    """An opened converted directory.

    Attributes:
      path: the directory.
      spec: what it holds.
      dtype: of all parameters.
    """

    path: Path
    spec: ModelSpec
    dtype: np.dtype

    @property
    def dtypes(self) -> set[np.dtype]:
        """The one dtype, as a set."""
        return {self.dtype}

    def read(self, unit: Unit) -> dict[str, np.ndarray]:
        """The parameters of one unit.

        Raises:
          ValueError: damaged, or other names, shapes or dtypes than spec.json describes.
        """
        where = self.path / PARAMS / unit.name
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                arrays = checkpointer.restore(where.absolute(), args=ocp.args.PyTreeRestore())
            except (ValueError, OSError, KeyError) as error:
                raise ValueError(f"{where} cannot be read: {error}") from error
        expected = {leaf: (size, str(self.dtype)) for leaf, size in unit.shapes(self.spec).items()}
        found = {leaf: (array.shape, str(array.dtype)) for leaf, array in arrays.items()}
        if found != expected:
            raise ValueError(f"{where} holds {found}, but {SPEC} describes {expected}")
        return {leaf: np.asarray(array) for leaf, array in arrays.items()}


def is_converted(path: Path) -> bool:
    """Whether a directory is a converted one, by its content."""
    return (path / SPEC).is_file() and (path / PARAMS).is_dir()


def open_converted(path: Path) -> ConvertedCheckpoint:
    """Opens a converted directory and checks that it is complete; reads no weights.

    Raises:
      ValueError: spec.json is of another format or damaged, or units are missing.
    """
    written = read_config(path / SPEC).values
    if written.get("format") != FORMAT:
        raise ValueError(
            f"{path / SPEC}: format={written.get('format')!r} is not supported; supported: {FORMAT}"
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
    return ConvertedCheckpoint(path, spec, supported(written.get("dtype")))


def write_spec(path: Path, spec: ModelSpec, dtype: np.dtype):
    """Writes spec.json."""
    content: dict[str, Any] = {"format": FORMAT, "dtype": str(dtype), "spec": dataclasses.asdict(spec)}
    (path / SPEC).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_unit(path: Path, unit: Unit, arrays: dict[str, np.ndarray]):
    """Writes the parameters of one unit, in our layout."""
    contiguous = {leaf: np.ascontiguousarray(array) for leaf, array in arrays.items()}
    # Compressed and buffered in pieces: whole arrays and files of Orbax's default size would need about
    # the unit's size in memory once more, both on writing and on reading.
    pieces = {leaf: ocp.SaveArgs(chunk_byte_size=PIECE) for leaf in contiguous}
    args = ocp.args.PyTreeSave(contiguous, save_args=pieces, ocdbt_target_data_file_size=PIECE)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((path / PARAMS / unit.name).absolute(), args=args)
