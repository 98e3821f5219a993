"""The journal of answers: an append-only JSONL file from which an interrupted run resumes.

Its first line says on what device and with which versions the answers and their times were made. One run
writes to it at a time: it holds a lock, which the system takes back when the run ends, however it ends.
lm_eval has a cache of its own, which is filled batch by batch too.
"""

import json
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dllm_jax import provenance
from dllm_jax.eval.results.schema import Entry

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

PACKAGES = ("dllm-jax", "jax")


@runtime_checkable
class Ledger(Protocol):
    """Where a runner finds earlier answers and puts new ones.

    Attributes:
      entries: by request hash.
    """

    entries: dict[str, Entry]

    def claim(self):
        """Makes sure that answers can be added; called before any is computed.

        Raises:
          ValueError: another run adds to it.
        """
        ...

    def add(self, entries: Iterable[Entry]):
        """Adds the entries of a finished batch."""
        ...

    def close(self):
        """Lets others add; called when a run fails or is interrupted."""
        ...


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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        binary = getattr(os, "O_BINARY", 0)  # of Windows
        writer = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | binary, 0o666)
        try:
            lock(writer, self.path)
            self._read(self.path.read_bytes())
        except BaseException:
            os.close(writer)
            raise
        self._writer, self._close = writer, weakref.finalize(self, os.close, writer)

    def close(self):
        """Gives the lock back; the journal may be claimed again."""
        self._writer = None
        self._close()

    def _read(self, content: bytes):
        self._whole = 0
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
                if number == 1:
                    self._check_origin(entry)
                else:
                    check_entry(entry)
                    self.entries[entry["key"]] = entry
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
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
        """Appends the entries and syncs them to disk; claims the journal, if that was not done.

        Raises:
          ValueError: another run adds to it.
          OSError: the file cannot be written, such as on a full disk; what was added before is kept.
        """
        self.claim()
        assert self._writer is not None, "claimed"
        entries = list(entries)
        lines = [] if self._whole else [json.dumps({"origin": origin()}) + "\n"]
        lines += [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]
        content = "".join(lines).encode()

        # An unfinished line, of a run that was killed or of a disk that was full, is cut off first.
        with open(self._writer, "ab", closefd=False) as file:
            if os.fstat(self._writer).st_size > self._whole:
                file.truncate(self._whole)
            file.write(content)
            file.flush()
            os.fsync(self._writer)
        self._whole += len(content)
        self.entries |= {entry["key"]: entry for entry in entries}


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

    def claim(self):
        """Claims the journal, if there is one."""
        if self.journal is not None:
            self.journal.claim()

    def close(self):
        """Closes the journal, if there is one."""
        if self.journal is not None:
            self.journal.close()

    def add(self, entries: Iterable[Entry]):
        """Adds the entries of a finished batch."""
        entries = list(entries)
        if self.journal is not None:
            self.journal.add(entries)
        for entry in entries:
            answer = entry["answer"]  # JSON turns lm_eval's tuples into lists
            for args in self.args[entry["key"]] if entry["error"] is None else ():
                self.hook.add_partial(self.kind, args, tuple(answer) if isinstance(answer, list) else answer)


def lock(descriptor: int, path: Path):
    """Takes the exclusive lock of an open file, until the descriptor is closed.

    Raises:
      ValueError: another run, of this process or of another one, holds it.
      OSError: the file system has no locks.
    """
    try:
        if sys.platform == "win32":
            # A byte far behind the content, since a locked one cannot be read by others.
            os.lseek(descriptor, 1 << 40, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"{path}: another evaluation is adding its answers to it: wait until it has ended, or choose "
            "another file or --out"
        ) from None
    except OSError as error:
        reason = f"cannot be locked ({error.strerror}), choose another folder"
        raise OSError(error.errno, reason, str(path)) from None


def check_entry(entry: Any):
    """Raises TypeError if a line of a journal is no `Entry`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
        raise TypeError("it has no key")
    if "answer" not in entry or not isinstance(entry.get("error", 0), str | None):
        raise TypeError("it has no answer and error")


def origin() -> dict[str, str]:
    """The device and the versions that make answers and their times now."""
    where = provenance.device()
    return {"device": f"{where.count} x {where.kind} ({where.platform})", **provenance.versions(PACKAGES)}
