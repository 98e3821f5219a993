"""Writing a converted directory, or a model in memory, as a Hugging Face directory, unit by unit."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import numpy as np

from dllm_jax.checkpoint.config import Config, read_config
from dllm_jax.checkpoint.converted import is_converted, open_converted
from dllm_jax.checkpoint.dtypes import choose
from dllm_jax.checkpoint.families import spec_to_config
from dllm_jax.checkpoint.files import copy_auxiliary_files
from dllm_jax.checkpoint.names.table import Unit, to_hf
from dllm_jax.checkpoint.source import Source, locate, progress, stream
from dllm_jax.checkpoint.staging import atomic_directory, check_apart
from dllm_jax.checkpoint.writer import SHARD_BYTES, plan, write
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import layer_of
from dllm_jax.nn.spec import ModelSpec


def export(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    show_progress: bool = False,
) -> Path:
    """Writes a converted checkpoint back as a Hugging Face directory, every tensor bit for bit.

    config.json, tokenizer and other small files come back as they were kept; where the spec was changed
    (rope_factor, dtype) config.json says so.

    Args:
      source: a directory written by `convert`.
      destination: directory to write; it appears only when complete.
      overwrite: replace an existing checkpoint; it stays until the new one is complete.
      shard_bytes: largest size of a safetensors file; a larger tensor gets a file of its own.
      show_progress: draw a bar on standard error.

    Returns:
      the destination.

    Raises:
      FileExistsError: the destination exists.
      FileNotFoundError: no such source.
      ValueError: not a converted directory, damaged, or it contains the destination.
    """
    found, target = locate(source), Path(destination)
    check_apart(found, target)
    if not is_converted(found):
        raise ValueError(f"{found} is no converted directory (no spec.json and params/ as `convert` writes)")
    checkpoint = open_converted(found)
    original = read_config(found / "config.json") if (found / "config.json").is_file() else None
    with atomic_directory(target, overwrite) as partial:
        copy_auxiliary_files(found, partial)
        with progress("export", checkpoint, checkpoint.dtype, show_progress) as advance:
            _write(partial, checkpoint, original, shard_bytes, advance)
    return target


def save_hf(
    model: Model,
    destination: str | os.PathLike[str],
    keep_from: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a model, e.g. one just trained, as a Hugging Face directory.

    Args:
      model: parameters of one dtype, float32 or bfloat16.
      destination: directory to write; it appears only when complete.
      keep_from: a directory whose small files (tokenizer, config.json, ...) go along.
      overwrite: replace an existing checkpoint; it stays until the new one is complete.
      shard_bytes: largest size of a safetensors file; a larger tensor gets a file of its own.

    Returns:
      the destination.

    Raises:
      FileExistsError: the destination exists.
      ValueError: parameters of another or of several dtypes, or a spec its family's config.json cannot hold.
    """
    target, original = Path(destination), None
    if keep_from is not None and (Path(keep_from) / "config.json").is_file():
        original = read_config(Path(keep_from) / "config.json")
    with atomic_directory(target, overwrite) as partial:
        if keep_from is not None:
            copy_auxiliary_files(Path(keep_from), partial)
        _write(partial, InMemory(model), original, shard_bytes, lambda unit: None)
    return target


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A model in memory as a `Source`, read unit by unit like a checkpoint on disk."""

    model: Model

    @property
    def path(self) -> Path:
        """A name for error messages: a model has no directory."""
        return Path("model")

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.model.spec

    @property
    def dtypes(self) -> set[np.dtype]:
        """The dtypes of the parameters."""
        return {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(self.model.params)}

    def read(self, unit: Unit) -> dict[str, np.ndarray]:
        """The parameters of one unit by name, fetched from the device."""
        params = self.model.params
        if unit.layer is None:
            return {entry.leaf: np.asarray(params[entry.leaf]) for entry in unit.entries}
        layer = layer_of(params, unit.layer)
        return {entry.leaf: np.asarray(layer[entry.leaf]) for entry in unit.entries}


def _write(
    path: Path,
    source: Source,
    original: Config | None,
    shard_bytes: int,
    advance: Callable[[Unit], None],
):
    spec, dtype = source.spec, choose(None, source.dtypes, str(source.path))
    values = spec_to_config(spec, str(dtype), original)
    if original is None or values != original.values:
        (path / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    shards = plan(spec, dtype, shard_bytes)
    tensors = _tensors(spec, stream(source, dtype), advance)
    write(path, shards, tensors)
    next(tensors, None)  # all are written; this lets the last unit count as done


def _tensors(
    spec: ModelSpec,
    read: Iterable[tuple[Unit, dict[str, np.ndarray]]],
    advance: Callable[[Unit], None],
) -> Iterator[np.ndarray]:
    for unit, arrays in read:
        for entry in unit.entries:
            yield to_hf(spec, entry, arrays[entry.leaf])
        advance(unit)
