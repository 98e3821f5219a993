"""Reads text and JSON files; errors name file and line."""

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
      ValueError: not UTF-8; names file and line.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(f"{path}:{line}: not UTF-8: byte {byte:#04x}, {error.reason}") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
      ValueError: not UTF-8 or not JSON; names file and line.
    """
    try:
        return json.loads(read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
