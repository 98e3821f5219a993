"""Converting a Hugging Face directory for this library, one unit in memory at a time."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.checkpoint import files
from dllm_jax.checkpoint.converted import is_converted, write_spec, write_unit
from dllm_jax.checkpoint.dtypes import choose, choose_weights
from dllm_jax.checkpoint.exporting import write_tensors
from dllm_jax.checkpoint.hf import open_hf
from dllm_jax.checkpoint.loading import scale_rope
from dllm_jax.checkpoint.names.family import Family
from dllm_jax.checkpoint.sharded import Source
from dllm_jax.checkpoint.source import locate_model, progress, read_units
from dllm_jax.checkpoint.staging import atomic_directory, check_apart
from dllm_jax.checkpoint.tensors import weight_files
from dllm_jax.nn.int8 import Weights
from dllm_jax.options import local_path
from dllm_jax.provenance import now, versions

LIBRARIES = ("dllm-jax", "jax", "jaxlib", "numpy", "ml_dtypes", "orbax-checkpoint", "safetensors")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dtype: Any = None,
    rope_factor: float = 1.0,
    overwrite: bool = False,
    check_finite: bool = False,
    show_progress: bool = False,
    weights: Weights | None = None,
    revision: str | None = None,
    family: Family | None = None,
) -> Path:
    """Converts a Hugging Face checkpoint; see `dllm_jax.checkpoint.converted` for what is written.

    The destination appears only when complete, so one that exists is whole.

    Args:
      source: a Hugging Face directory or hub id.
      destination: directory to write.
      dtype: float32 or bfloat16; None keeps the stored one as `load` does.
      rope_factor: multiplies the rotary base and the limit on positions for good (NTK scaling).
      overwrite: replace an existing checkpoint; it stays until the new one is complete.
      check_finite: refuse weights with NaN or infinity, but those that are only carried along.
      show_progress: draw a bar on standard error.
      weights: "int8" writes matrices in int8, half of bfloat16's size; the way back is refused. See
        `dllm_jax.nn.int8`.
      revision: Branch, tag or commit of a hub id; None takes the main branch.
      family: Description of a model type that the library does not know (`Family`, docs/adding-a-family.md).

    Returns:
      the destination.

    Raises:
      FileExistsError: the destination exists, and `overwrite` is False or it is no checkpoint; or another
        process writes it.
      FileNotFoundError: no such source, or files of it are missing.
      NotADirectoryError: the source is a file.
      ValueError: see `load`; also if the source is converted already, or source and destination are the same
        or contain one another.
    """
    directory, target = locate_model(source, revision, family), local_path("destination", destination)
    check_apart(directory, target)
    if is_converted(directory):
        raise ValueError(
            f"{directory} is converted already; expected a Hugging Face directory. dj.load reads it as it "
            "is, and `dllm-jax export` writes it back, unless it holds int8 matrices."
        )
    checkpoint = open_hf(directory, family)

    # What can be told from the arguments is refused before a directory appears next to the destination.
    written = choose(dtype, checkpoint.dtypes, str(directory), checkpoint.matrices)
    form = choose_weights(weights, None, str(directory))
    spec = scale_rope(checkpoint.spec, rope_factor)
    with (
        atomic_directory(target, overwrite) as partial,
        progress("convert", checkpoint, show_progress) as advance,
    ):
        for unit, arrays in read_units(checkpoint, written, form, check_finite):
            write_unit(partial, unit, arrays)
            advance()
        if checkpoint.carried:
            write_tensors(partial / files.CARRIED, checkpoint.carried)
        # spec.json comes last but for the hashes, which are of everything before them.
        files.copy_files(directory, files.auxiliary_files(directory), partial)
        write_spec(partial, spec, written, form)
        history = _provenance(checkpoint, str(source), written, form, rope_factor)
        history |= {files.WRITTEN: files.written(partial)}
        files.write_object(partial / files.PROVENANCE, history)
    return target


def _provenance(
    checkpoint: Source, source: str, written: np.dtype, weights: Weights | None, rope_factor: float
) -> dict[str, Any]:
    # All that was read or copied: names alone would not tell one revision of the source from another.
    root = checkpoint.path
    read = (*files.auxiliary_files(root), *weight_files(root))
    read += (root / files.INDEX,) if (root / files.INDEX).is_file() else ()
    return {
        "source": source,
        "date": now(),
        "files": {file.relative_to(root).as_posix(): files.described_files(file) for file in read},
        **({} if checkpoint.quantized is None else {"quantized": checkpoint.quantized}),
        "dtype": {"stored": sorted(map(str, checkpoint.dtypes)), "written": str(written)},
        **({} if weights is None else {"weights": weights}),
        "rope_factor": rope_factor,
        "versions": versions(LIBRARIES),
    }
