"""Tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

RULES = {"l": "---", "r": "---:"}


def table(heads: Sequence[str], align: str, rows: Iterable[Sequence[Any]]) -> str:
    """A table.

    Args:
      heads: of the columns.
      align: "l" or "r" for every column.
      rows: cells, shown by `str`.
    """
    lines = [heads, [RULES[one] for one in align], *rows]
    if wrong := [line for line in lines if len(line) != len(heads)]:
        raise ValueError(f"{wrong[0]} has not as many cells as {heads}")
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
