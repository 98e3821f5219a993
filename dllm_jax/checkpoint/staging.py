"""Writes a directory atomically: whenever the process dies, it is either absent or complete."""

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from dllm_jax.checkpoint.directory import resolved

# Directories of this module end in a random UUID (version 4); whatever else has such a name is the user's.
UUID = re.compile(r"[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}")


@contextlib.contextmanager
def atomic_directory(destination: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside `destination` and renames it when the block ends.

    All of it is on the disk before it is renamed (fsync), so that a power cut leaves no empty files. With
    `overwrite` the old directory stays until the new one is complete. Leftovers of a killed run are removed
    by the next run; a live run holds a lock on its directory, which is then left alone.

    Args:
      destination: final path of the directory.
      overwrite: replace an existing checkpoint.

    Raises:
      FileExistsError: the destination exists and may not, or cannot safely, be replaced.
      OSError: writing failed, e.g. as the disk is full; names a file or the destination.
      ValueError: the destination is a link in a circle.
    """
    destination = resolved(destination)
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    # Under the parent's lock, so that two runs do not take each other's leftovers for dead.
    with contextlib.ExitStack() as held:
        with _locked(parent):
            _clear_up(destination)
            _check_free(destination, overwrite)
            partial = parent / f"{_prefix(destination, 'partial')}{uuid.uuid4().hex}"
            partial.mkdir()
            held.enter_context(_locked(partial))
        try:
            yield partial
            # Everything is on the disk before it has its name.
            _flush(partial)
            with _locked(parent):
                _check_free(destination, overwrite)
                _swap(partial, destination)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                # What fails in writing to an open file, such as a full disk, names none.
                raise OSError(error.errno, error.strerror, str(destination)) from error
            raise


def check_apart(source: Path, destination: Path):
    """Raises ValueError if one directory is, or contains, the other: replacing one would destroy both."""
    a, b = resolved(source), resolved(destination)
    if a == b or a in b.parents or b in a.parents:
        raise ValueError(f"source {a} and destination {b} must not be the same or contain one another")


def left_behind(destination: Path) -> Path | None:
    """The old directory that a killed run had moved away from a destination that is absent now."""
    old = _leftovers(destination, "replaced") if destination.parent.is_dir() else []
    return old[0] if old and not destination.exists() else None


def _check_free(destination: Path, overwrite: bool):
    if not destination.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{destination} exists; pass --overwrite (overwrite=True) to replace it")
    if not _is_checkpoint(destination):
        raise FileExistsError(f"{destination} exists and is no checkpoint directory; it is not overwritten")


def _is_checkpoint(path: Path) -> bool:
    """Whether a directory holds a checkpoint or adapter; a config.json alone is found in other ones too."""
    if (path / "adapter_config.json").is_file() and (path / "adapter_model.safetensors").is_file():
        return True
    if (path / "spec.json").is_file():
        return (path / "params").is_dir()
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _swap(partial: Path, destination: Path):
    old = destination.parent / f"{_prefix(destination, 'replaced')}{uuid.uuid4().hex}"
    if destination.exists():
        destination.rename(old)
    # Two renames: a kill between them leaves the old directory aside, which the next run puts back.
    try:
        partial.rename(destination)
    except BaseException:
        if old.exists():
            old.rename(destination)
        raise
    _sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clear_up(destination: Path):
    """Removes leftovers of killed runs, and restores an old directory that a killed swap had moved away."""
    # A swap was cut short: the old directory is waste if the new one is in place, and else the only one.
    for old in _leftovers(destination, "replaced"):
        if destination.exists():
            shutil.rmtree(old)
        else:
            old.rename(destination)
    for partial in _leftovers(destination, "partial"):
        with contextlib.suppress(BlockingIOError), _locked(partial, wait=False):  # or its process is alive
            shutil.rmtree(partial)


def _leftovers(destination: Path, kind: str) -> list[Path]:
    """Directories of this module beside a destination; a user's files and links of similar names are none."""
    prefix = _prefix(destination, kind)
    return [
        path
        for path in destination.parent.iterdir()
        if path.name.startswith(prefix)
        and UUID.fullmatch(path.name.removeprefix(prefix))
        and path.is_dir()
        and not path.is_symlink()
    ]


def _flush(directory: Path):
    """Waits until everything in a directory is on the disk."""
    # Directories too: a file that is on the disk may still have no name there.
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(destination: Path, kind: str) -> str:
    return f".{destination.name}.{kind}-"


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Locks a directory; the lock dies with the process. Raises BlockingIOError where it will not wait."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
