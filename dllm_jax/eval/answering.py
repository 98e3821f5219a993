"""Keyed items through a function, batch by batch: each is journalled as it finishes, failures stay single."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import rich.console
import rich.progress

from dllm_jax.eval.journal import Entry, Ledger

Item = TypeVar("Item")
Answer = Callable[[list[tuple[str, Item]]], list[Entry]]
FAILURES = (ValueError, RuntimeError, MemoryError, NotImplementedError)  # RuntimeError: also XLA's


def answered(
    asked: Sequence[tuple[str, Item]],
    batched: Callable[[list[tuple[str, Item]]], Iterable[list[tuple[str, Item]]]],
    answer: Answer[Item],
    journal: Ledger | None = None,
    title: str | None = None,
) -> list[Entry]:
    """Entries of the items, in order; those that the journal holds are not computed again.

    Failures are entries too (`error`, no answer); a resumed run tries them again.

    Args:
      asked: items by the hash of everything that determines their answer; equal ones are computed once.
      batched: splits what is left to do.
      answer: a batch's entries, see `entry`.
      journal: where entries are looked for, and left as soon as their batch is finished.
      title: of the progress bar, which moves with every batch; None shows none.
    """
    done = dict(journal.entries) if journal else {}
    open_ = {key: item for key, item in asked if done.get(key, {"error": ""})["error"] is not None}
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, disable=title is None, transient=True) as bar:
        task = bar.add_task(title or "", total=len(open_))
        for chunk in batched(list(open_.items())):
            entries = _each(chunk, answer)
            done |= {entry["key"]: entry for entry in entries}
            if journal:
                journal.add(entries)
            bar.advance(task, len(chunk))
    return [done[key] for key, _ in asked]


def entry(key: str, answer: Any = None, error: str | None = None, **measured: Any) -> Entry:
    """What is known of an item: its answer and costs, or why there is none."""
    return {"key": key, "answer": answer, "error": error, **measured}


def _each(chunk: list[tuple[str, Item]], answer: Answer[Item]) -> list[Entry]:
    """The chunk's entries; if it fails as a whole, one by one, so that only the culprit fails."""
    try:
        return answer(chunk)
    except FAILURES as error:
        if len(chunk) > 1:
            return [found for pair in chunk for found in _each([pair], answer)]
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        return [entry(chunk[0][0], error=reason.splitlines()[0])]
