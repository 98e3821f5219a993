"""Answers keyed items batch by batch: finished batches are journalled, and a failure stays with its item."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import rich.console
import rich.progress

from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.journal import Ledger

Item = TypeVar("Item")
Answer = Callable[[list[tuple[str, Item]]], list[Entry]]
FAILURES = (ValueError, RuntimeError, MemoryError, NotImplementedError)  # XLA's are RuntimeErrors


def answered(
    asked: Sequence[tuple[str, Item]],
    batched: Callable[[list[tuple[str, Item]]], Iterable[list[tuple[str, Item]]]],
    answer: Answer[Item],
    journal: Ledger | None = None,
    title: str | None = None,
) -> list[Entry]:
    """Entries of the items, in order; those in the journal are not computed again.

    Failures are entries too, with `error` set and no answer; a resumed run retries them.

    Args:
      asked: (key, item) pairs; items of equal key are computed once.
      batched: splits the items still to be computed into batches.
      answer: computes a batch's entries.
      journal: holds entries of earlier runs, and takes each batch as it finishes.
      title: of the progress bar; None shows no bar.
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


def _each(chunk: list[tuple[str, Item]], answer: Answer[Item]) -> list[Entry]:
    """The chunk's entries; if the chunk fails, its items are tried one by one."""
    try:
        return answer(chunk)
    except FAILURES as error:
        if len(chunk) > 1:
            return [found for pair in chunk for found in _each([pair], answer)]
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        return [Entry(key=chunk[0][0], answer=None, error=reason.splitlines()[0])]
