"""Writes a directory atomically: whenever the process dies, it is either absent or complete."""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

MARKERS = ("config.json", "spec.json")


@contextlib.contextmanager
def atomic_directory(destination: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory beside `destination` and renames it when the block ends.

    With `overwrite` the old directory stays until the new one is complete. Leftovers of a killed run are
    removed by the next run; a live run holds a lock on its directory, which is then left alone.

    Args:
      destination: final path of the directory.
      overwrite: replace an existing checkpoint.

    Raises:
      FileExistsError: the destination exists and may not, or cannot safely, be replaced.
    """
    destination = destination.resolve()
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent):
        _clear_up(destination)
        _check_free(destination, overwrite)
        partial = parent / f"{_prefix(destination, 'partial')}{uuid.uuid4().hex}"
        partial.mkdir()
        lock = _lock(partial)
    try:
        yield partial
        with _locked(parent):
            _check_free(destination, overwrite)
            _swap(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def check_apart(source: Path, destination: Path):
    """Raises ValueError if one directory is, or contains, the other: replacing one would destroy both."""
    a, b = source.resolve(), destination.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ValueError(f"source {a} and destination {b} must not be the same or contain one another")


def _check_free(destination: Path, overwrite: bool):
    if not destination.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{destination} exists; pass --overwrite (overwrite=True) to replace it")
    if not any((destination / marker).is_file() for marker in MARKERS):
        raise FileExistsError(f"{destination} exists and is no checkpoint directory; it is not overwritten")


def _swap(partial: Path, destination: Path):
    old = destination.parent / f"{_prefix(destination, 'replaced')}{uuid.uuid4().hex}"
    if destination.exists():
        destination.rename(old)
    partial.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


def _clear_up(destination: Path):
    """Removes leftovers of killed runs, and restores an old directory that a killed swap had moved away."""
    siblings = list(destination.parent.iterdir())
    for old in (path for path in siblings if path.name.startswith(_prefix(destination, "replaced"))):
        if destination.exists():
            shutil.rmtree(old)
        else:
            old.rename(destination)
    for partial in (path for path in siblings if path.name.startswith(_prefix(destination, "partial"))):
        try:
            os.close(_lock(partial))
        except BlockingIOError:  # its process is alive
            continue
        shutil.rmtree(partial)


def _prefix(destination: Path, kind: str) -> str:
    return f".{destination.name}.{kind}-"


def _lock(path: Path) -> int:
    """Locks a directory without waiting; the lock dies with the process. Raises BlockingIOError if taken."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
