"""Locks of the operating system: one writer at a time, until it ends, however it ends."""

import errno
import fcntl
import warnings
from pathlib import Path
from typing import IO

UNKNOWN = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class NoLockWarning(UserWarning):
    """A file system has no locks: a second writer would not be refused."""


def hold(opened: IO[bytes] | int, path: Path, wait: bool = False):
    """Locks an open file or directory until it is closed; the system closes it when the process is killed.

    Args:
      opened: File, or descriptor of a directory, whose lock nobody else gets meanwhile.
      path: Its path, for the warning.
      wait: Whether to wait until another holder closes it.

    Raises:
      BlockingIOError: somebody else holds it, in this process or another.
      OSError: it cannot be locked.

    Warns:
      NoLockWarning: the file system has no locks.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        message = f"{path}: its file system has no locks ({error.strerror}). Let one process write there"
        warnings.warn(message, NoLockWarning, stacklevel=3)
