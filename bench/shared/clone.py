"""Clones of other projects, whose modules a bench imports: they are no part of the repository."""

import importlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def modules(path: Path, project: str, names: Iterable[str]) -> list[Any]:
    """Imports modules from a clone.

    Raises:
      SystemExit: a package that they need is not installed.
    """
    sys.path.insert(0, str(path))
    try:
        return [importlib.import_module(name) for name in names]
    except ModuleNotFoundError as error:
        raise SystemExit(f"{project} needs {error.name}, which is not installed: pip install it") from error
    finally:
        sys.path.remove(str(path))


def commit(path: Path) -> str | None:
    """The commit that is checked out; None if the directory is no clone."""
    git = ["git", "-C", str(path), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
