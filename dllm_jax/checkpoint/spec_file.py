"""spec.json of a converted directory: format, dtype, how matrices are held, and the fields of ModelSpec.

The ranges of the fields are those of `ModelSpec`, which config.json is read into as well: one schema for
both.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.checkpoint.directory import read_object
from dllm_jax.checkpoint.dtypes import SUPPORTED
from dllm_jax.checkpoint.families import family_of
from dllm_jax.nn.int8 import Weights
from dllm_jax.nn.spec import ModelSpec

SPEC = "spec.json"
FORMATS: dict[int, Weights | None] = {1: None, 2: "int8", 3: None, 4: "int8"}  # and how they hold matrices
WRITTEN: dict[Weights | None, int] = {None: 3, "int8": 4}
# Fields that directories written before there were such may lack: those with a default, at which they are.
OPTIONAL = {
    field.name: field.default
    for field in dataclasses.fields(ModelSpec)
    if field.default is not dataclasses.MISSING
}
KEYS = {"format", "dtype", "weights", "spec"}


def read_spec(folder: Path) -> tuple[ModelSpec, np.dtype, Weights | None]:
    """Reads and checks the spec.json of a converted directory.

    Returns:
      the model, the dtype of all parameters but int8 matrices, and how matrices are held: "int8", or None for
      that dtype.

    Raises:
      FileNotFoundError: there is none.
      ValueError: another format, other keys than that format has, or a value outside of its range, by name.
    """
    where, written = folder / SPEC, read_object(folder / SPEC)
    version, weights = written.get("format"), written.get("weights")
    if type(version) is not int or version not in FORMATS:
        supported = ", ".join(map(str, FORMATS))
        raise ValueError(f"{where}: format={version!r} is not supported; supported: {supported}")

    # The number says it already, so that a reader that knows no int8 stops at the number.
    if weights != FORMATS[version]:
        raise ValueError(
            f"{where}: weights={weights!r} does not belong to format {version}, "
            f"whose weights are {FORMATS[version]!r}"
        )
    if not written.keys() <= KEYS:
        unknown = ", ".join(sorted(written.keys() - KEYS))
        raise ValueError(f"{where}: unknown keys {unknown}; known: {', '.join(sorted(KEYS))}")
    dtypes = {str(dtype): dtype for dtype in SUPPORTED}
    name = written.get("dtype")
    if not isinstance(name, str) or name not in dtypes:
        raise ValueError(f"{where}: dtype={name!r} is not supported; supported: {', '.join(dtypes)}")
    return _spec(where, written.get("spec")), dtypes[name], weights


def write_spec(folder: Path, spec: ModelSpec, dtype: np.dtype, weights: Weights | None):
    """Writes spec.json."""
    content: dict[str, Any] = {"format": WRITTEN[weights], "dtype": str(dtype)}
    content |= {} if weights is None else {"weights": weights}

    # Optional fields at their defaults are left out, as in directories from before there were such.
    fields = dataclasses.asdict(spec)
    left_out = {name for name, default in OPTIONAL.items() if fields[name] == default}
    content |= {"spec": {name: fields[name] for name in fields if name not in left_out}}
    (folder / SPEC).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _spec(where: Path, fields: Any) -> ModelSpec:
    names = {field.name for field in dataclasses.fields(ModelSpec)}
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: spec={fields!r} must be an object with the fields of ModelSpec")

    # Optional fields count as there, so that the symmetric difference is what is wrong or missing.
    if wrong := sorted((fields.keys() | set(OPTIONAL)) ^ names):
        raise ValueError(f"{where}: spec has wrong or missing fields {wrong}")
    try:
        spec = ModelSpec.of_fields(fields)
        family_of(spec)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    return spec
