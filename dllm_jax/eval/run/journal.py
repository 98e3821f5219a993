"""The journal of answers: an append-only JSONL file from which an interrupted run resumes.

Its first line says on what device and with which versions the answers and their times were made. One run
writes to it at a time: it holds a lock, which the system takes back when the run ends, however it ends.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dllm_jax import locks, provenance
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.files import as_json
from dllm_jax.options import check_argument, local_path, shown

BEGINNING = b'{"origin": '  # of every journal


class JournalRequest(NamedTuple):
    """An item that a journal was asked about.

    Attributes:
      key: Key of its entry.
      item: The item itself.
      number: Its place among all items, from 0: the same in every run, as a random key of its own needs it.
    """

    key: str
    item: Any
    number: int


class Journal:
    """Stores answers by key in a JSONL file, from which an interrupted run resumes.

        with dj.Journal("answers.jsonl") as journal:
            left = journal.left(questions)
            for index, out in dj.generate_many(model, [ids(asked.item) for asked in left], length=32):
                (text,) = dj.decode_answers(model, tokenizer, out.tokens[:, -32:])
                journal.answer(left[index], text)

    The last entry of a key counts. A killed run leaves at most one unfinished line, the last; it is dropped.
    A journal is resumed by the device and versions that began it only: a result names one of each, for all
    its answers and speeds.

    Reading takes no lock. A run that adds to a journal holds its lock from then on, until it is closed, or
    the process ends.

    Args:
      path: Path of the file; created, with its folders, when it is claimed or first added to. None: entries,
        of any values, are kept in memory alone.

    Attributes:
      path: Absolute path of the file, or None.
      entries: Entry of each key: a dictionary with "key", "answer", "error" and what was added to these.

    Raises:
      ValueError: a finished line that is broken, with file and line; a file that is no journal; or another
        device or version.
      OSError: the file cannot be read.
    """

    _file = _lock = None  # open for appending, and its lock

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self.path = path = None if path is None else local_path("path", path)
        self.entries: dict[str, Entry] = {}
        self._whole = 0  # bytes up to the end of the last finished line
        if path is not None and path.exists():
            self._read(path.read_bytes())

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object):
        self.close()

    def left(self, items: Iterable[Any], settings: Any = None) -> list[JournalRequest]:
        """Lists the items that have no answer yet, failed ones too, and claims the journal if there are any.

        Args:
          items: What is asked, such as texts: anything that JSON holds. Equal items are different requests,
            told apart by their order.
          settings: What else answers depend on, such as the model's name and the length. An item that was
            answered with other settings has no answer.

        Raises:
          ValueError: another run adds to the journal; items that are one text or no iterable; or an item or
            settings that JSON cannot hold.
          OSError: the file cannot be made or locked.
        """
        asked = _asked(items, settings)
        unanswered = lambda: [each for each in asked if not self.has_answer(each.key)]
        if unanswered():
            self.claim()  # another run may have answered some meanwhile
        return unanswered()

    def found(self, items: Iterable[Any], settings: Any = None) -> list[dict[str, Any] | None]:
        """Lists the entry of each item, in order; None where there is none. Arguments as of `left`."""
        entries: dict[str, Any] = {**self.entries}
        return [entries.get(each.key) for each in _asked(items, settings)]

    def has_answer(self, key: str) -> bool:
        """Whether a key has an answer; one whose last entry is a failure has none."""
        return key in self.entries and self.entries[key]["error"] is None

    def answer(self, asked: JournalRequest, answer: Any, **more: Any):
        """Appends the answer to an item of `left`, with `more` about it, such as costs; syncs it to disk.

        Raises:
          ValueError: another run adds to the journal; answer or `more` holds NaN or infinity; or `more` has a
            name that every entry has, such as `key`.
          TypeError: JSON cannot hold answer or `more`.
          OSError: the file cannot be written, such as on a full disk; what was added before is kept.
        """
        self._add(asked, answer, None, more)

    def fail(self, asked: JournalRequest, error: Exception | str, **more: Any):
        """Appends the reason why an item of `left` has no answer; `left` lists it again. See `answer`."""
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
        self._add(asked, None, reason, more)

    def _add(self, asked: JournalRequest, answer: Any, error: str | None, more: dict[str, Any]):
        check_argument("asked", asked, JournalRequest, ", an item of journal.left(items)")
        check_argument("error", error, str | None)
        entry: Any = {"key": asked.key, "asked": asked.item, "answer": answer, "error": error}
        if both := sorted(entry.keys() & more.keys()):
            value = shown(more[both[0]])
            raise ValueError(f"{both[0]}={value} is a name that every entry has. Choose another.")
        self.add([entry | more])

    def claim(self):
        """Takes the journal's lock, which this journal keeps, and reads what others added before.

        Raises:
          ValueError: another run holds the lock; or the file is refused, as when a `Journal` is made.
          OSError: the file cannot be made or locked.
        """
        if self._file is not None or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        lock: locks.Lock | None = None
        try:
            lock = locks.hold(self.path)
            self._read(self.path.read_bytes())
        except BaseException as error:
            file.close()
            if lock is not None:
                lock.close()
            if isinstance(error, BlockingIOError):
                reason = "another run is adding answers to it: wait until it has ended"
                raise ValueError(f"{self.path}: {reason}, or choose another file or --out") from None
            raise
        self._file, self._lock = file, lock

    def close(self):
        """Gives the lock back; the journal may be claimed again."""
        for resource in (self._file, self._lock):
            if resource is not None:
                resource.close()
        self._file = self._lock = None

    __del__ = close

    def add(self, entries: Iterable[Entry]):
        """Appends the entries and syncs them to disk; claims the journal, if that was not done.

        Raises:
          ValueError: another run adds to it, or an entry holds NaN or infinity.
          TypeError: JSON cannot hold an entry.
          OSError: the file cannot be written, such as on a full disk; what was added before is kept.
        """
        self.claim()
        entries = list(entries)
        if self._file is not None:
            lines: list[Any] = [*([] if self._whole else [{"origin": origin()}]), *entries]
            content = "".join(as_json(line) + "\n" for line in lines).encode()
            # An unfinished line, of a run that was killed or of a disk that was full, is cut off first.
            with open(self._file.fileno(), "ab", closefd=False) as file:
                file.truncate(self._whole)
                file.write(content)
                file.flush()
                os.fsync(file)
            self._whole += len(content)
        # Only what is on the disk counts as added.
        self.entries |= {entry["key"]: entry for entry in entries}

    def _read(self, content: bytes):
        """Takes the entries of a file; every finished line must be one."""
        self._whole = 0
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            # Only the last line can be unfinished; `add` cuts it off. One of another file is not ours to cut;
            # zeros are what a machine that stopped leaves.
            begun = line.rstrip(b"\0")
            if not line.endswith(b"\n") and (number > 1 or begun.startswith(BEGINNING[: len(begun)])):
                return
            value: Any = None  # which is refused below
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
            given: Any = value if isinstance(value, dict) else {}
            if number == 1:
                self._check_origin(given.get("origin"))
            else:
                # An entry, as far as resuming reads it.
                kinds = {"key": str, "answer": object, "error": str | None}
                if not all(name in given and isinstance(given[name], kind) for name, kind in kinds.items()):
                    reason = "not an entry of a journal, an object with key, answer and error"
                    raise ValueError(f"{self.path}:{number}: {reason}")
                # Times of older versions that include compilation are measured again.
                if not given.get("cold"):
                    self.entries[given["key"]] = given
            self._whole += len(line)

    def _check_origin(self, then: Any):
        """Refuses a journal of another device or version, or one that does not say which."""
        if not isinstance(then, dict):
            reason = "does not begin with the device and versions of its answers"
            raise ValueError(f"{self.path}: {reason}; choose another file or --out, or delete it")
        differing = [(name, now) for name, now in origin().items() if then.get(name) != now]
        changed = [f"{name} {shown(then.get(name))} (now {now!r})" for name, now in differing]
        if changed:
            reason = f"its answers were made with {', '.join(changed)}"
            raise ValueError(f"{self.path}: {reason}; choose another file or --out")

    def merge(self, paths: Iterable[str | os.PathLike[str]]) -> int:
        """Adds the entries of other journals; of a request that several have, an answer before a failure.

        Args:
          paths: Paths of journals made on as many devices of this kind with the same versions.

        Returns:
          how many entries were added.

        Raises:
          FileNotFoundError: a journal is missing.
          ValueError: another run adds to this one; or one is broken, or of another device or version.
        """
        # Claimed first, so that nobody adds to it between what is read and what is written.
        self.claim()
        new: dict[str, Entry] = {}
        for path in map(Path, paths):
            if not path.is_file():
                reason = "no part was evaluated there, or one without requests"
                raise FileNotFoundError(f"{path} does not exist: {reason}")
            for key, entry in Journal(path).entries.items():
                known = new.get(key) or self.entries.get(key)
                if known is None or (known["error"] is not None and entry["error"] is None):
                    new[key] = entry
        self.add(new.values())
        self.close()
        return len(new)


def _asked(items: Iterable[Any], settings: Any) -> list[JournalRequest]:
    """The items with their keys: hashes of settings, item, and how many equal items came before."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise ValueError(f"items={shown(items)} must be several items, such as a list of texts")
    asked, before = list[JournalRequest](), Counter[str]()
    for number, item in enumerate(items):
        try:
            said = json.dumps([settings, item], sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            given = f"item {shown(item)} or settings={shown(settings)}"
            raise ValueError(f"{given} is not JSON: {error}") from None
        repeat = f"#{before[said]}" if before[said] else ""
        asked.append(JournalRequest(hashlib.sha256(said.encode()).hexdigest() + repeat, item, number))
        before[said] += 1
    return asked


def origin() -> dict[str, str]:
    """The device and the versions that make answers and their times now."""
    where = provenance.device()
    versions = provenance.versions(("dllm-jax", "jax"))
    return {"device": f"{where.count} x {where.kind} ({where.platform})", **versions}
