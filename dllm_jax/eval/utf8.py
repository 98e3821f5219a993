"""Text files whose faults are named by file and line."""

from pathlib import Path


def read(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
      ValueError: a byte that is no UTF-8; names file and line.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(f"{path}:{line}: not UTF-8: byte {byte:#04x}, {error.reason}") from None
