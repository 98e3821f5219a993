"""The tensors of a Hugging Face directory: which file each is in, and reading a part of one."""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from dllm_jax.checkpoint.config import read_config
from dllm_jax.checkpoint.files import INDEX, file_inside, has_entry, listed, taken_for_another, what_else
from dllm_jax.checkpoint.sharded import Ranges

ADAPTER, WHOLE = "adapter_model.safetensors", "model.safetensors"
# Which safetensors does not read as NumPy arrays, by their names there.
FLOAT8 = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, as it is stored or as it is computed from others.

    Attributes:
      shape: Shape of the whole tensor.
      dtype: Name of the dtype in safetensors.
      read: Reads one part of it.
      quantized: Whether its numbers are computed from those of a quantized tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Ranges], np.ndarray]
    quantized: bool = False

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.read(tuple(slice(0, length) for length in self.shape))


def tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a directory by name, none of them read yet; an index decides which file each is in.

    Raises:
      FileNotFoundError: no safetensors, or a shard that the index names is missing.
      ValueError: an unreadable file, or a tensor that is in several files without an index.
    """
    listed_in = read_index(path)
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for file in weight_files(path):
        place = file.relative_to(path).as_posix()
        for name, tensor in tensors_of_file(file).items():
            # An older copy of a tensor may be left in another shard.
            if listed_in.get(name, place) != place:
                continue
            if name in tensors:
                raise ValueError(f"{path}: {name} is in both {places[name]} and {place}")
            tensors[name], places[name] = tensor, place
    return tensors


def read_index(path: Path) -> Mapping[str, str]:
    """The file of each tensor by the directory's index, relative to it, maybe in folders; empty without one.

    Raises:
      ValueError: the index is not valid.
    """
    if not has_entry(path, INDEX):
        return {}
    index = read_config(path / INDEX).values.get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{path / INDEX} has no weight_map from tensor to file")
    # One spelling of each file: "./a/b" is "a/b".
    return {tensor: PurePosixPath(name).as_posix() for tensor, name in index.items()}


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a directory: those its index names, or all where there is no index.

    Raises:
      FileNotFoundError: there is none, or one the index names is missing.
      ValueError: the index is not valid, or a file lies outside of the directory.
    """
    if has_entry(path, INDEX):
        # An index may name anything: files of this directory only.
        return tuple(_file_of_index(path, name) for name in sorted(set(read_index(path).values())))
    names = sorted(file.name for file in path.glob("*.safetensors") if file.name != ADAPTER)
    if not names:
        raise FileNotFoundError(f"{path} holds no *.safetensors{what_else(path)}")
    return tuple(file_inside(path, name) for name in names)


def _file_of_index(path: Path, name: str) -> Path:
    try:
        return file_inside(path, name)
    except FileNotFoundError as error:
        hint = f"; {WHOLE} is there: remove the index to read it" if (path / WHOLE).is_file() else ""
        raise FileNotFoundError(f"{error}, which {INDEX} asks for{hint}") from None


def carried(tensors: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
    """The tensors whose whole names match a family's pattern (`Family.carried`)."""
    return {name: tensor for name, tensor in tensors.items() if re.fullmatch(pattern, name)}


def tensors_of_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, none of them read yet."""
    file.open("rb").close()  # names a file that may not be read, which safetensors calls missing
    with safetensors(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        described = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    return {name: Tensor(*of, functools.partial(_read, file, name, *of)) for name, of in described.items()}


def _read(file: Path, name: str, shape: tuple[int, ...], dtype: str, ranges: Ranges) -> np.ndarray:
    """A part of a tensor in a file whose header was checked before."""
    # Opened again for each part, or copied: an open file keeps every page read so far mapped, which would
    # count as the process's memory and grow to the size of the shard.
    if dtype not in FLOAT8:
        with safetensors(file) as opened:
            return opened.get_slice(name)[ranges]
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        start = json.loads(opened.read(size))[name]["data_offsets"][0]
    return np.array(np.memmap(file, FLOAT8[dtype], "r", 8 + size + start, shape)[ranges])


@contextlib.contextmanager
def safetensors(file: Path) -> Iterator[Any]:
    """A safetensors file, open; raises ValueError that names it where it cannot be read."""
    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        if what := taken_for_another(file):
            raise ValueError(f"{file} {what}") from None
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from error


def check_dtypes(kinds: Mapping[str, str], supported: Mapping[str, Any], where: str):
    """Raises ValueError that lists tensors of other dtypes than the supported ones, all by name."""
    if odd := [f"{name}: {kind}" for name, kind in kinds.items() if kind not in supported]:
        known = ", ".join(supported)
        raise ValueError(listed(f"{where}: dtypes that are not supported; supported: {known}", odd))
