"""A share of an evaluation's requests, so that hosts that share nothing but files evaluate together.

Each host answers its part into a folder of its own; `merge` puts the journals together, and the evaluation
itself then finds all answers in one. An answer does not depend on its batch, so nothing is lost.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.journal import Journal


class Part(NamedTuple):
    """One of `count` parts, from 1; requests belong to parts by their hash.

    Attributes:
      number: which one.
      count: how many there are.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def read(cls, text: str) -> "Part":
        """Reads "2/4".

        Raises:
          ValueError: another form, or no part of so many.
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"part={text!r} must be like 2/4, from 1/4 to 4/4")
        return cls(int(found[1]), int(found[2]))

    def holds(self, key: str) -> bool:
        """Whether a request belongs to it, by the request's hash."""
        return int(key[:8], 16) % self.count == self.number - 1


def merge(into: Path, journals: Iterable[Path]) -> int:
    """Adds the entries of journals to one; where several have a request, an answer counts before a failure.

    Args:
      into: the journal's file; created if it is not there.
      journals: files of the parts, made on the same kind of device with the same versions.

    Returns:
      how many entries were added.

    Raises:
      FileNotFoundError: a journal is missing.
      ValueError: one is broken, or of another device or version.
    """
    # Claimed first, so that nobody adds to it between what is read and what is written.
    target, new = Journal(into), dict[str, Entry]()
    target.claim()
    for path in journals:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: no part was evaluated there")
        for key, entry in Journal(path).entries.items():
            known = new.get(key) or target.entries.get(key)
            if known is None or (known["error"] is not None and entry["error"] is None):
                new[key] = entry
    target.add(new.values())
    target.close()
    return len(new)
