"""Where lm-evaluation-harness's requests leave what is finished."""

from collections.abc import Iterable, Sequence
from typing import Any

from dllm_jax.eval.journal import Entry, Journal


class Both:
    """Finished batches go to the journal and to lm_eval's cache at once, not at the end.

    Args:
      journal: where entries are kept, if anywhere.
      hook: lm_eval's `CacheHook`; failures do not get there.
      kind: of request, as lm_eval names it.
      keys: the requests' hashes.
      args: the requests' arguments, by which lm_eval knows them; several may share a hash.
    """

    def __init__(self, journal: Journal | None, hook: Any, kind: str, keys: Sequence[str], args: Sequence):
        self.entries = {} if journal is None else journal.entries
        self.journal, self.hook, self.kind = journal, hook, kind
        self.args: dict[str, list[Any]] = {}
        for key, known in zip(keys, args, strict=True):
            self.args.setdefault(key, []).append(known)

    def add(self, entries: Iterable[Entry]):
        """Takes the entries of a finished batch."""
        entries = list(entries)
        if self.journal is not None:
            self.journal.add(entries)
        for entry in entries:
            answer = entry["answer"]  # a log-likelihood is a list in JSON, and a tuple for lm_eval
            for args in self.args[entry["key"]] if entry["error"] is None else ():
                self.hook.add_partial(self.kind, args, tuple(answer) if isinstance(answer, list) else answer)
