"""Answers keyed items in batches of few static shapes, journalling each; a failure stays with its item."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import rich.console
import rich.progress

from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.journal import Journal

Item = TypeVar("Item")
Answer = Callable[[list[tuple[str, Item]]], list[Entry]]
NOT_FINITE = "FloatingPointError: logits held NaN or infinity"  # the error of an item of which that is so
FAILURES = (ValueError, RuntimeError, MemoryError, NotImplementedError)  # XLA's are RuntimeErrors


def answers(
    items: Sequence[tuple[str, Item]],
    answer: Answer[Item],
    batch: int,
    shape: Callable[[Item], Any],
    journal: Journal | None = None,
    title: str | None = None,
    finished: Callable[[list[Entry]], object] = lambda entries: None,
) -> list[Entry]:
    """Entries of the items, in order; those in the journal are not computed again.

    Failures are entries too, with `error` set and no answer; a resumed run retries them.

    Args:
      items: (key, item) pairs; items of equal key are computed once.
      answer: computes the entries of at most `batch` pairs whose items have one shape.
      batch: items at a time.
      shape: of an item; batches come in ascending order of it.
      journal: holds entries of earlier runs, and takes each batch as it finishes.
      title: of the progress bar; None shows no bar.
      finished: is told the entries of each batch once they are in the journal.

    Raises:
      ValueError: another run adds to the journal.
    """
    done: dict[str, Entry] = {}
    unanswered = lambda: {k: item for k, item in items if k not in done or done[k]["error"] is not None}
    of_pair = lambda pair: shape(pair[1])
    console = rich.console.Console(stderr=True)
    try:
        if journal is not None:
            # Who else adds to the journal is found out before anything is computed; it may be longer by then.
            done |= journal.entries
            if unanswered():
                journal.claim()
            done |= journal.entries
        # Batches of one shape follow each other, so that each program is compiled once.
        pairs = sorted(unanswered().items(), key=of_pair)
        with rich.progress.Progress(console=console, disable=title is None, transient=True) as bar:
            task = bar.add_task(title or "", total=len(pairs))
            for _, group in itertools.groupby(pairs, key=of_pair):
                alike = list(group)
                for chunk in (alike[i : i + batch] for i in range(0, len(alike), batch)):
                    entries = _each(chunk, answer)
                    if journal is not None:
                        journal.add(entries)
                    finished(entries)
                    done |= {entry["key"]: entry for entry in entries}
                    bar.advance(task, len(chunk))
    except BaseException:
        # A run that ends here adds no more: what goes on from it, in this process even, may.
        if journal is not None:
            journal.close()
        raise
    return [done[key] for key, _ in items]


def _each(chunk: list[tuple[str, Item]], answer: Answer[Item]) -> list[Entry]:
    """The chunk's entries; if the chunk fails, its items are tried one by one."""
    try:
        return answer(chunk)
    except FAILURES as error:
        # One of them may be at fault, or all of them together too much for the device's memory.
        if len(chunk) > 1:
            return [found for pair in chunk for found in _each([pair], answer)]
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        return [Entry(key=chunk[0][0], answer=None, error=reason.splitlines()[0])]


def filled(batch: Sequence[Item], size: int) -> list[Item]:
    """The batch, filled up to `size` with copies of its first item."""
    return [*batch, *[batch[0]] * (size - len(batch))]
