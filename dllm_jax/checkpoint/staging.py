"""Writes a directory atomically: whenever the process dies, it is either absent or complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dllm_jax import locks
from dllm_jax.options import absolute

ON_WINDOWS = os.name == "nt"


@contextlib.contextmanager
def atomic_directory(destination: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty directory next to `destination` and renames it when the block ends.

    All of it is on the disk before it is renamed (fsync), so that a power cut leaves no empty files. With
    `overwrite` the old directory stays until the new one is complete. Leftovers of a killed run are removed
    by the next run; a live run holds a lock on its directory.

    Args:
      destination: final path of the directory.
      overwrite: replace an existing checkpoint.

    Raises:
      FileExistsError: the destination exists and may not, or cannot safely, be replaced; or another process
        is writing it.
      OSError: writing failed, e.g. as the disk is full; names a file or the destination.
      ValueError: the destination is a link in a circle.
    """
    destination = absolute(destination)
    parent = destination.parent
    parent.mkdir(parents=True, exist_ok=True)
    partial, old = (parent / f".{destination.name}.dllm_jax-{kind}" for kind in ("partial", "replaced"))
    # Under the parent's lock, so that two runs do not take each other's directories for leftovers.
    with contextlib.ExitStack() as stack:
        with locks.hold(parent, wait=True):
            _clear_up(destination, partial, old)
            _check_free(destination, overwrite)
            partial.mkdir()
            stack.enter_context(locks.hold(partial, wait=True))
        try:
            yield partial
            # Everything is on the disk before it has its name.
            _flush(partial)
            with locks.hold(parent, wait=True):
                _check_free(destination, overwrite)
                _swap(partial, destination, old)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                # What fails in writing to an open file, such as a full disk, names none.
                raise OSError(error.errno, error.strerror, str(destination)) from error
            raise


def check_apart(source: Path, destination: Path):
    """Raises ValueError if one directory is, or contains, the other: replacing one would destroy both."""
    a, b = absolute(source), absolute(destination)
    if a == b or a in b.parents or b in a.parents:
        raise ValueError(f"source {a} and destination {b} must not be the same or contain one another")


def _check_free(destination: Path, overwrite: bool):
    if not destination.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{destination} exists; --overwrite (overwrite=True) replaces a checkpoint")
    if not _is_checkpoint(destination):
        raise FileExistsError(f"{destination} exists and is no checkpoint directory; it is not overwritten")


def _is_checkpoint(path: Path) -> bool:
    """Whether a directory holds a checkpoint or adapter; a config.json alone is found in other ones too."""
    if (path / "adapter_config.json").is_file() and (path / "adapter_model.safetensors").is_file():
        return True
    if (path / "spec.json").is_file():
        return (path / "params").is_dir()
    # Of several files of weights, which may lie in folders, an index tells.
    return (path / "config.json").is_file() and any(path.glob("*.safetensors*"))


def _swap(partial: Path, destination: Path, old: Path):
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


def _clear_up(destination: Path, partial: Path, old: Path):
    """Removes what a killed run left, and restores an old directory that a killed swap had moved away."""
    # A swap was cut short: the old directory is waste if the new one is in place, and else the only one.
    if old.exists() and not destination.exists():
        old.rename(destination)
    shutil.rmtree(old, ignore_errors=True)
    if partial.exists():
        try:
            with locks.hold(partial):
                shutil.rmtree(partial)
        except BlockingIOError:
            raise FileExistsError(f"{destination} is being written by another process") from None


def _flush(directory: Path):
    """Waits until everything in a directory is on the disk."""
    # Directories too: a file that is on the disk may still have no name there.
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path):
    if ON_WINDOWS and path.is_dir():  # which it opens no descriptor of
        return
    descriptor = os.open(path, os.O_RDWR if ON_WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
