"""Text and JSON files: read with errors that name file and line, written atomically."""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dllm_jax.options import shown
from dllm_jax.state.text import check_texts


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark (as Excel, Notepad and PowerShell write it).

    Raises:
      FileNotFoundError: no such file.
      ValueError: not UTF-8; names file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(f"{path}:{line}: not UTF-8: byte {byte:#04x}, {error.reason}") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not UTF-8 or not JSON, or a text with half of a character; names file and line.
    """
    value = _value(read_text(path), path, 1)
    check_texts(f"{path}: the value", value)
    return value


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file with one in each line, each with "file:line"; empty lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not UTF-8, a line that is no JSON object, or a text with half of a character; names file and
        line.
    """
    # Only \n ends a line: a JSON string may hold the other separators that `splitlines` knows.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            value = _value(line, path, number)
            if not isinstance(value, dict):
                raise ValueError(f"{path}:{number}: expected an object, found {type(value).__name__}")
            check_texts(f"{path}:{number}: the object", value)
            yield f"{path}:{number}", value


def read_samples(path: Path, make: Callable[[dict[str, Any], str], Any]) -> list[Any]:
    """Makes a sample with `id` and `where` from each object of such a file and its "file:line".

    Raises:
      FileNotFoundError: no such file.
      ValueError: as `read_objects`, what `make` refuses, an id that is given twice, or no object at all.
    """
    items: dict[str, Any] = {}
    for where, value in read_objects(path):
        try:
            item = make(value, where)
            if item.id in items:
                raise ValueError(f"id {shown(item.id)} is that of {items[item.id].where} too")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        items[item.id] = item
    if not items:
        raise ValueError(f"{path} holds no samples")
    return list(items.values())


def _value(text: str, path: Path, first: int) -> Any:
    """The JSON value in a text whose first line has this number in the file."""
    try:
        return json.loads(text.removeprefix("\ufeff"))  # as files are that were put together of several
    except json.JSONDecodeError as error:
        where = f"{path}:{first + error.lineno - 1}"
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"{path}:{first}: not JSON: nested too deeply") from None


def as_json(value: Any, indent: int | None = None) -> str:
    """Encodes a value as JSON that UTF-8 can hold: lone surrogates, as a broken text has them, as escapes.

    Raises:
      TypeError: a value that is no JSON.
      ValueError: NaN or infinity, for which JSON has no number.
    """
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        reason = "NaN, infinity or a circular reference cannot be written as JSON"
        raise ValueError(f"{reason}: {error}") from None
    return re.sub("[\ud800-\udfff]", lambda match: rf"\u{ord(match[0]):04x}", text)


def write_json(path: Path, value: Any):
    """Writes a JSON file and its folders atomically: to a temporary file, which is then renamed.

    Raises:
      ValueError: the value holds NaN or infinity.
    """
    try:
        text = as_json(value, indent=1)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader, or a run that is killed here, sees the old file or the new one; two writers have a part each.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
