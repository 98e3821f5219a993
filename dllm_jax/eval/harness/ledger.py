"""The ledger of lm-evaluation-harness's requests."""

from collections.abc import Iterable, Sequence
from typing import Any

from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.journal import Journal


class Both:
    """Passes each finished batch to the journal and to lm_eval's cache.

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
