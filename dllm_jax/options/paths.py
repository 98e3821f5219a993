"""Paths that users give: the one place where `~`, `..`, links and relative paths become absolute ones."""

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dllm_jax.options.rules import shown

URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)")  # a drive such as C: is none
HUB = ("huggingface.co/", "hf.co/")


def local_path(name: str, value: Any) -> Path:
    """The absolute path of a file or directory on this machine, without `~`, `..` and links.

    Args:
      name: Name of the argument, for messages.
      value: Path as the user gave it.

    Raises:
      ValueError: no path, an empty one, a URL, or links in a circle.
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"{name}={shown(value)} must be a path, as a str or a pathlib.Path")
    if url := URL.fullmatch(str(value)):
        raise ValueError(
            f"{name}={shown(str(value))} is a URL, not a path on this machine. {_instead(**url.groupdict())}"
        )
    try:
        os.stat(value)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        # A text that is no path, such as a whole file's content: too long, or with a zero byte in it.
        if not isinstance(error, OSError) or error.errno == errno.ENAMETOOLONG:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{name}={shown(str(value))} is no path: {reason}") from None
    return absolute(Path(value))


def absolute(path: Path) -> Path:
    """The path without `~`, `..` and links; raises ValueError if links lead in a circle."""
    with contextlib.suppress(RuntimeError):  # no such user: then it is a name like others
        path = path.expanduser()
    try:
        return path.resolve()
    except (RuntimeError, OSError) as error:  # the former up to Python 3.12
        raise ValueError(f"{path} is a link in a circle") from error


def _instead(scheme: str, rest: str) -> str:
    """The way to a checkpoint at a URL, as a message ends."""
    if scheme == "file":
        return f"Pass the path alone: {'/' + unquote(rest)!r}."
    for hub in HUB:
        if rest.startswith(hub):
            return f"Pass the hub id: {'/'.join(rest.removeprefix(hub).split('/')[:2])!r}."
    if scheme == "hf":
        return f"Pass the hub id: {'/'.join(rest.split('/')[:2])!r}."
    return f"Copy it to this machine first{' (gcloud storage cp -r)' if scheme == 'gs' else ''}."
