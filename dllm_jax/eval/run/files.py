"""Text and JSON files: read with errors that name file and line, written atomically."""

import json
import os
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
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
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{path}: not JSON: nested too deeply") from None


def write_json(path: Path, value: Any):
    """Writes a JSON file and its folders atomically: to a temporary file, which is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)
