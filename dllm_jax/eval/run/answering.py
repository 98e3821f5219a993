"""Answers items in batches of few static shapes, journalling each batch; a failure stays with its item."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import rich.console
import rich.progress

from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.settings import Decoding, LanguageModel

Item = TypeVar("Item")
NOT_FINITE = "FloatingPointError: logits held NaN or infinity"  # the error of an item of which that is so
FAILURES = (ValueError, RuntimeError, MemoryError, NotImplementedError)  # XLA's are RuntimeErrors


@dataclasses.dataclass(frozen=True)
class Answering(abc.ABC, Generic[Item]):
    """A model with settings, ready to answer items of some kind.

    Attributes:
      lm: the model with its tokenizer; its identity is part of an item's hash.
      decoding: settings.
      progress: show a progress bar.
    """

    lm: LanguageModel
    decoding: Decoding
    progress: bool = False

    @abc.abstractmethod
    def key(self, item: Item) -> str:
        """Hash of everything that determines the item's answer; items of equal hash are answered once."""

    def keys(self, items: Sequence[Item]) -> list[str]:
        """The key of each item's answer."""
        return [self.key(item) for item in items]

    @abc.abstractmethod
    def _shape(self, item: Item) -> Any:
        """Returns the static shape of an item's program; items come in ascending order of it."""

    def _batches(self, pairs: list[tuple[str, Item]]) -> list[list[tuple[str, Item]]]:
        """Groups the items, in ascending order of shape, for `_answers`: all together."""
        return [pairs]

    @abc.abstractmethod
    def _answers(self, pairs: list[tuple[str, Item]], at_once: int) -> Iterator[list[Entry]]:
        """The entries of a batch of items, given with their hashes, a few at a time as they are there.

        Args:
          pairs: Pairs in ascending order of shape.
          at_once: Number of pairs computed together.

        Raises:
          one of `FAILURES`: there are no more entries.
        """

    def run(
        self,
        items: Sequence[Item],
        journal: Journal | None = None,
        finished: Callable[[list[Entry]], object] = lambda entries: None,
    ) -> list[Entry]:
        """An entry per item, in order; those in the journal are not computed again.

        Failures are entries too, with `error` set and no answer; a resumed run retries them.

        Args:
          items: Items to answer.
          journal: holds entries of earlier runs, and takes each batch as it finishes.
          finished: is told the entries of each batch once they are in the journal.

        Raises:
          ValueError: another run adds to the journal.
          KeyboardInterrupt: Ctrl-C, with a message that names the journal.
        """
        keyed = list(zip(self.keys(items), items, strict=True))
        journal = Journal() if journal is None else journal
        unanswered = lambda: {key: item for key, item in keyed if not journal.has_answer(key)}
        try:
            # Who else adds to the journal is found out before anything is computed; it may be longer by then.
            if unanswered():
                journal.claim()
            # Batches of one shape follow each other, so that each program is compiled once.
            pairs = sorted(unanswered().items(), key=lambda pair: self._shape(pair[1]))
            console = rich.console.Console(stderr=True)
            hidden = not self.progress or not pairs  # of no answers a bar would be full
            with rich.progress.Progress(console=console, disable=hidden, transient=True) as bar:
                task = bar.add_task("answers", total=len(pairs))
                for batch in self._batches(pairs):
                    for entries in self._each(batch, self.decoding.batch):
                        journal.add(entries)
                        finished(entries)
                        bar.advance(task, len(entries))
        except BaseException as error:
            # A run that ends here adds no more: what goes on from it, in this process even, may.
            journal.close()
            if isinstance(error, KeyboardInterrupt) and journal.path is not None:
                reason = f"interrupted: {journal.path} holds the answers so far"
                raise KeyboardInterrupt(f"{reason}. Run the same again to go on") from None
            raise
        return [journal.entries[key] for key, _ in keyed]

    def _each(self, pairs: list[tuple[str, Item]], at_once: int) -> Iterator[list[Entry]]:
        """Their entries; if some fail, those without an entry are tried one by one."""
        left = dict(pairs)
        try:
            for entries in self._answers(pairs, at_once):
                for entry in entries:
                    del left[entry["key"]]
                yield entries
        except FAILURES as error:
            # One of them may be at fault, or all of them together too much for the device's memory.
            alone = len(pairs) == at_once == 1
            for pair in left.items():
                yield from [[failure(pair[0], error)]] if alone else self._each([pair], 1)


def failure(key: str, error: Exception) -> Entry:
    """The entry of an item that has no answer."""
    reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return Entry(key=key, answer=None, error=reason.splitlines()[0])
