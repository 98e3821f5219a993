"""Whether a checkpoint's files are still what was written: hashes are compared with those that were kept.

A converted directory keeps SHA-256 of spec.json and of every file of its units in provenance.json. Of a
Hugging Face directory hashes are known where it is the hub's own cache, whose files are named by them:
SHA-256 of what lies in large-file storage, git's SHA-1 of the rest. Any other directory is refused by name.
"""

import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.converted import PARAMS, is_converted
from dllm_jax.checkpoint.directory import file_inside, has_entry, read_object
from dllm_jax.checkpoint.files import PROVENANCE, sha256
from dllm_jax.checkpoint.hf import INDEX, weight_files
from dllm_jax.checkpoint.source import locate
from dllm_jax.checkpoint.spec_file import SPEC

WRITTEN = "written"  # the key of provenance.json
BLOBS = {64: "sha256", 40: "sha1"}  # digits of a name in the hub's cache


@dataclasses.dataclass(frozen=True)
class Integrity:
    """What `check_integrity` found.

    Attributes:
      path: the checkpoint's directory.
      files: how many files were compared.
      nbytes: their size.
      seconds: how long it took.
      faults: what is wrong, a line per file: damaged, missing, or not written by the conversion.
    """

    path: Path
    files: int
    nbytes: int
    seconds: float
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every file is as it was written."""
        return not self.faults

    def __str__(self) -> str:
        size = f"{self.files} files, {self.nbytes / 1e9:.2f} GB, {self.seconds:.1f} s"
        if self.ok:
            return f"{self.path}: as written ({size})"
        return "\n  ".join(
            [f"{self.path}: {len(self.faults)} files are not as written ({size})", *self.faults]
        )


def check_integrity(path: str | os.PathLike[str]) -> Integrity:
    """Reads every file of a checkpoint's weights and compares its hash with the one that was kept.

    It reads as many bytes as the checkpoint has, once; `load` reads them again.

    Args:
      path: a converted directory, one in the hub's cache, or a hub id.

    Raises:
      FileNotFoundError: no such directory and no such hub id.
      ValueError: no hashes are known: by name, with what to do; or provenance.json is damaged.
    """
    folder, begun = locate(path), time.monotonic()
    known = _kept(folder) if is_converted(folder) else _named(folder)
    faults, nbytes = [], 0
    for name, (size, algorithm, digest) in known.items():
        try:
            file = file_inside(folder, name)
        except (FileNotFoundError, ValueError):
            faults.append(f"missing: {name}")
            continue
        found = file.stat().st_size
        nbytes += found
        if found != size:
            faults.append(f"damaged: {name} has {found} bytes instead of {size}")
        elif _digest(file, algorithm) != digest:
            faults.append(f"damaged: {name} has another {algorithm}")
    if is_converted(folder):
        faults += [f"not of this conversion: {name}" for name in _names(folder) if name not in known]
    return Integrity(folder, len(known), nbytes, time.monotonic() - begun, tuple(faults))


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of everything in a converted directory that a model is made of, by relative name."""
    files = {name: folder / name for name in _names(folder)}
    return {name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for name, file in files.items()}


def _names(folder: Path) -> Iterator[str]:
    """Relative names of spec.json and of all files of the units; hidden files beside units do not count."""
    yield SPEC
    for file in sorted((folder / PARAMS).rglob("*")):
        name = file.relative_to(folder)
        if not file.is_dir() and not name.parts[1].startswith("."):
            yield name.as_posix()


Known = dict[str, tuple[int, str, str]]  # size, algorithm and digest by relative name


def _kept(folder: Path) -> Known:
    """What provenance.json says of a converted directory."""
    where = folder / PROVENANCE
    kept = read_object(where).get(WRITTEN) if has_entry(folder, PROVENANCE) else None
    if kept is None:
        raise ValueError(
            f"{where} holds no hashes of what was written: {folder} was converted by an earlier release, and "
            "cannot be verified; convert the original again"
        )
    if not isinstance(kept, dict) or not all(map(_is_entry, kept.values())):
        raise ValueError(f"{where}: {WRITTEN} must hold bytes and sha256 of each file")
    return {name: (entry["bytes"], "sha256", entry["sha256"]) for name, entry in kept.items()}


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
    )


def _named(folder: Path) -> Known:
    """What the names of files in the hub's cache say."""
    index = (folder / INDEX,) if has_entry(folder, INDEX) else ()
    known, unknown = {}, []
    for file in (folder / "config.json", *index, *weight_files(folder)):
        blob = file.resolve()
        if file.is_symlink() and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
            known[file.name] = (blob.stat().st_size, BLOBS[len(blob.name)], blob.name)
        else:
            unknown.append(file.name)
    if unknown:
        raise ValueError(
            f"{folder} holds no hashes of {', '.join(unknown)}: known are those of directories written by "
            "`convert`, and of the hub's cache"
        )
    return known


def _digest(file: Path, algorithm: str) -> str:
    """Hexadecimal digest of a file: SHA-256, or the SHA-1 by which git names it."""
    if algorithm == "sha256":
        return sha256(file)
    digest = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
    with file.open("rb") as opened:
        for piece in _pieces(opened):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(opened: Any) -> Iterable[bytes]:
    return iter(lambda: opened.read(2**20), b"")
