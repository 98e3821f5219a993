"""The journal of answers: an append-only JSONL file from which an interrupted run resumes.

Its first line says on what device and with which versions the answers and their times were made.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dllm_jax import provenance
from dllm_jax.eval.results.schema import Entry

PACKAGES = ("dllm-jax", "jax")


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

    A killed run leaves at most one unfinished line, the last; it is dropped. A journal is resumed by the
    device and versions that began it only: a result names one of each, for all its answers and speeds.

    Args:
      path: of the file; created, with its folders, by the first `add`.

    Raises:
      ValueError: a broken line that is not the last, with file and line; or another device or version.
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
            try:
                entry = json.loads(line)
                if number == 1:
                    self._check_origin(entry)
                else:
                    self.entries[entry["key"]] = entry
            except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
                raise ValueError(f"{self.path}:{number}: not an entry of a journal: {error}") from None
            self._whole += len(line)

    def _check_origin(self, line: Any):
        if not isinstance(line, dict) or not isinstance(line.get("origin"), dict):
            raise ValueError(
                f"{self.path}: does not begin with the device and versions of its answers; choose another "
                "file or --out, or delete it"
            )
        then, now = line["origin"], origin()
        changed = [
            f"{name} {then.get(name)!r} (now {now[name]!r})" for name in now if then.get(name) != now[name]
        ]
        if changed:
            raise ValueError(
                f"{self.path}: its answers were made with {', '.join(changed)}; choose another file or --out"
            )

    def add(self, entries: Iterable[Entry]):
        """Appends the entries and syncs them to disk."""
        lines = [] if self._whole else [json.dumps({"origin": origin()}) + "\n"]
        for entry in entries:
            self.entries[entry["key"]] = entry
            lines.append(json.dumps(entry, ensure_ascii=False) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._whole)
            self._whole += file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())


def origin() -> dict[str, str]:
    """The device and the versions that make answers and their times now."""
    where = provenance.device()
    return {"device": f"{where.count} x {where.kind} ({where.platform})", **provenance.versions(PACKAGES)}
