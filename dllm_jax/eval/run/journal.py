"""The journal of answers: an append-only JSONL file from which an interrupted run resumes.

Its first line says on what device and with which versions the answers and their times were made. lm_eval has
a cache of its own, which is filled batch by batch too.
"""

import json
import os
from collections.abc import Iterable, Sequence
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


class CacheLedger:
    """Passes each finished batch to the journal and to lm_eval's cache of requests.

    Args:
      journal: None keeps no journal.
      hook: lm_eval's `CacheHook`; failed requests are not passed to it.
      kind: lm_eval's name of the request type.
      keys: the requests' hashes.
      args: the requests' arguments, lm_eval's cache key; several requests may share a hash.
    """

    def __init__(self, journal: Journal | None, hook: Any, kind: str, keys: Sequence[str], args: Sequence):
        self.entries = {} if journal is None else journal.entries
        self.journal, self.hook, self.kind = journal, hook, kind
        self.args: dict[str, list[Any]] = {}
        for key, known in zip(keys, args, strict=True):
            self.args.setdefault(key, []).append(known)

    def add(self, entries: Iterable[Entry]):
        """Adds the entries of a finished batch."""
        entries = list(entries)
        if self.journal is not None:
            self.journal.add(entries)
        for entry in entries:
            answer = entry["answer"]  # JSON turns lm_eval's tuples into lists
            for args in self.args[entry["key"]] if entry["error"] is None else ():
                self.hook.add_partial(self.kind, args, tuple(answer) if isinstance(answer, list) else answer)


def origin() -> dict[str, str]:
    """The device and the versions that make answers and their times now."""
    where = provenance.device()
    return {"device": f"{where.count} x {where.kind} ({where.platform})", **provenance.versions(PACKAGES)}
