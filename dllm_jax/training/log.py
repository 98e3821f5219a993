"""The log of a run: one JSON object per line, so that it survives a kill and is easy to plot."""

import json
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


def read(file: Path) -> list[Entry]:
    """The entries of a log; none if there is no file. A last line truncated by a kill is dropped."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rewind(file: Path, step: int) -> list[Entry]:
    """Drops the entries after a step, which a resumed run will write again, and returns the rest."""
    entries = [entry for entry in read(file) if entry["step"] <= step]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return entries


def append(file: Path, entry: Entry):
    """Adds an entry."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(entry) + "\n")
