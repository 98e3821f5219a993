"""Errors of Orbax with the unit's directory in front: they are of many kinds, and some name no file."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path


def reading(where: Path) -> contextlib.AbstractContextManager[None]:
    """Whatever fails inside raises ValueError: the unit in this directory is damaged."""
    return _named(f"{where} cannot be read", ValueError)


def writing(where: Path) -> contextlib.AbstractContextManager[None]:
    """Whatever fails inside raises OSError: this directory cannot be written, e.g. as the disk is full."""
    return _named(f"{where} cannot be written", OSError)


@contextlib.contextmanager
def _named(what: str, kind: type[Exception]) -> Iterator[None]:
    logger = logging.getLogger("absl")
    # Orbax's threads log the traceback of an error that they pass on: here it is chained, not shown first.
    logger.addFilter(_is_no_traceback)
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        logger.removeFilter(_is_no_traceback)


def _is_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info
