"""Locks of the operating system: one writer at a time, until it ends, however it ends.

The path itself is locked, also against other machines that share its file system. `filelock` opens a file for
writing, which no directory is: it serves where there is no `fcntl`.
"""

import errno
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where a package locks files in its place
    fcntl = None

UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class NoLockWarning(UserWarning):
    """A file system has no locks: a second writer would not be refused."""


class Lock:
    """A lock that is held until `close`, or until the process ends."""

    def __init__(self, release: Callable[[], object]):
        self._release: Callable[[], object] | None = release

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *error: object):
        self.close()

    def close(self):
        """Gives the lock back; again, does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


def hold(path: Path, wait: bool = False) -> Lock:
    """Locks a file or directory that exists.

    Args:
      path: File or directory, whose lock nobody else gets meanwhile.
      wait: Whether to wait until another holder gives it back.

    Raises:
      BlockingIOError: somebody else holds it, in this process or another.
      OSError: it cannot be locked.

    Warns:
      NoLockWarning: the file system has no locks.
    """
    return _file_in_its_place(path, wait) if fcntl is None else _descriptor(path, wait)


def _descriptor(path: Path, wait: bool) -> Lock:
    """A lock on a descriptor of the path itself."""
    assert fcntl is not None
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in UNKNOWN:
            os.close(descriptor)
            raise
        message = f"{path}: its file system has no locks ({error.strerror}). Let one process write there"
        warnings.warn(message, NoLockWarning, stacklevel=4)
    return Lock(functools.partial(os.close, descriptor))  # which lives as long as it, at exit too


def _file_in_its_place(path: Path, wait: bool) -> Lock:
    """A lock on a file of the user's temporary folder: Windows opens no directory."""
    import filelock  # used by this alone

    name = hashlib.sha256(os.path.normcase(path.resolve()).encode()).hexdigest()[:32]
    lock = filelock.FileLock(Path(tempfile.gettempdir()) / f"dllm_jax-{name}.lock", timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise BlockingIOError(errno.EAGAIN, "held by another process", str(path)) from None
    return Lock(lock.release)
