"""Warnings that point at the user's line, whatever lies between it and the library's."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PACKAGE = str(Path(__file__).parents[1])
BETWEEN = contextlib.__file__, functools.__file__, "<string>"  # decorators, and classes that dataclass made


class Notice(NamedTuple):
    """Text and category of a warning that is given later, or not at all."""

    message: str
    category: type[Warning] = UserWarning


def warn(message: str, category: type[Warning] = UserWarning):
    """Warns at the line that called the library."""
    frame, level = sys._getframe(1), 2
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    # All of it is the library's where it is run as a command.
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


def tell(notices: Iterable[Notice], told: set[type[Warning]] | None = None):
    """Gives warnings, of each category the first one.

    Args:
      notices: Warnings to give.
      told: Categories that were given in this call already, to which these are added.
    """
    told = set() if told is None else told
    for notice in notices:
        if notice.category not in told:
            told.add(notice.category)  # also where the user's program makes errors of warnings
            warn(*notice)


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) or file in BETWEEN or "/jax/_src/" in file
