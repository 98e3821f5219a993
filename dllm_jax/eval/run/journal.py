"""The journal of answers: an append-only JSONL file from which an interrupted run resumes.

Its first line says on what device and with which versions the answers and their times were made. One run
writes to it at a time: it holds a lock, which the system takes back when the run ends, however it ends.
"""

import fcntl
import json
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dllm_jax import provenance
from dllm_jax.eval.results.schema import Entry

PACKAGES = ("dllm-jax", "jax")


class Journal:
    """Entries by request hash; the last one of each hash counts.

    A killed run leaves at most one unfinished line, the last; it is dropped. A journal is resumed by the
    device and versions that began it only: a result names one of each, for all its answers and speeds.

    Anybody may read a journal. Who adds to it holds its lock from then on, until it is closed, forgotten, or
    the process ends.

    Args:
      path: of the file; created, with its folders, when it is claimed or first added to.

    Raises:
      ValueError: a broken line that is not the last, with file and line; or another device or version.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._whole = 0  # bytes up to the end of the last finished line
        self._writer: int | None = None  # descriptor of the locked file
        self._close = lambda: None
        if path.exists():
            self._read(path.read_bytes())

    def claim(self):
        """Takes the journal's lock, which this journal keeps, and reads what others added before.

        Raises:
          ValueError: another run holds the lock.
          OSError: the file cannot be made or locked.
        """
        if self._writer is not None:
            return
        # The lock is the open file's: the system gives it back when the descriptor closes, at a kill as well.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        writer = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(self.path.read_bytes())
        except BaseException as error:
            os.close(writer)
            if isinstance(error, BlockingIOError):
                reason = "another evaluation is adding its answers to it: wait until it has ended"
                raise ValueError(f"{self.path}: {reason}, or choose another file or --out") from None
            raise
        self._writer, self._close = writer, weakref.finalize(self, os.close, writer)

    def close(self):
        """Gives the lock back; the journal may be claimed again."""
        self._writer = None
        self._close()

    def add(self, entries: Iterable[Entry]):
        """Appends the entries and syncs them to disk; claims the journal, if that was not done.

        Raises:
          ValueError: another run adds to it.
          OSError: the file cannot be written, such as on a full disk; what was added before is kept.
        """
        self.claim()
        assert self._writer is not None, "claimed"
        entries = list(entries)
        lines: list[Any] = [*([] if self._whole else [{"origin": origin()}]), *entries]
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()

        # An unfinished line, of a run that was killed or of a disk that was full, is cut off first.
        with open(self._writer, "ab", closefd=False) as file:
            if os.fstat(self._writer).st_size > self._whole:
                file.truncate(self._whole)
            file.write(content)
            file.flush()
            os.fsync(self._writer)

        # Only what is on the disk counts as added.
        self._whole += len(content)
        self.entries |= {entry["key"]: entry for entry in entries}

    def _read(self, content: bytes):
        """Takes the entries of a file; every finished line must be one."""
        self._whole = 0
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            # Only the last line can be unfinished; `add` cuts it off.
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{self.path}:{number}: not an entry of a journal: {error}") from None
            if number == 1:
                self._check_origin(entry)
            elif is_entry(entry):
                self.entries[entry["key"]] = entry
            else:
                reason = "it has no key, answer and error"
                raise ValueError(f"{self.path}:{number}: not an entry of a journal: {reason}")
            self._whole += len(line)

    def _check_origin(self, line: Any):
        """Refuses a journal of another device or version, or one that does not say which."""
        then, now = line.get("origin") if isinstance(line, dict) else None, origin()
        if not isinstance(then, dict):
            reason = "does not begin with the device and versions of its answers"
            raise ValueError(f"{self.path}: {reason}; choose another file or --out, or delete it")
        changed = [
            f"{name} {then.get(name)!r} (now {now[name]!r})" for name in now if then.get(name) != now[name]
        ]
        if changed:
            reason = f"its answers were made with {', '.join(changed)}"
            raise ValueError(f"{self.path}: {reason}; choose another file or --out")


def is_entry(line: Any) -> bool:
    """Whether a line of a journal is an `Entry`, as far as resuming reads it."""
    if not isinstance(line, dict) or not {"key", "answer", "error"} <= line.keys():
        return False
    return isinstance(line["key"], str) and isinstance(line["error"], str | None)


def origin() -> dict[str, str]:
    """The device and the versions that make answers and their times now."""
    where = provenance.device()
    return {"device": f"{where.count} x {where.kind} ({where.platform})", **provenance.versions(PACKAGES)}
