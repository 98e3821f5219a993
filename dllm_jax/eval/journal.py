"""The journal of answers: an append-only JSONL file from which an interrupted run resumes."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from dllm_jax.eval.schema import Entry


@runtime_checkable
class Ledger(Protocol):
    """Where a runner finds earlier answers and puts new ones.

    Attributes:
      entries: by request hash.
    """

    entries: dict[str, Entry]

    def add(self, entries: Iterable[Entry]):
        """Adds the entries of a finished batch."""
        ...


class Journal:
    """Entries by request hash; the last one of each hash counts.

    A killed run leaves at most one unfinished line, the last; it is dropped.

    Args:
      path: of the file; created, with its folders, by the first `add`.

    Raises:
      ValueError: a broken line that is not the last; the message names file and line.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._whole = 0  # bytes up to the end of the last finished line
        if path.exists():
            self._read(path.read_bytes())

    def _read(self, content: bytes):
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                return
            self._whole += len(line)
            try:
                entry = json.loads(line)
                self.entries[entry["key"]] = entry
            except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
                raise ValueError(f"{self.path}:{number}: not an entry of a journal: {error}") from None

    def add(self, entries: Iterable[Entry]):
        """Appends the entries and syncs them to disk."""
        lines = []
        for entry in entries:
            self.entries[entry["key"]] = entry
            lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._whole)
            self._whole += file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
