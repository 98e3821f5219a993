"""Runs benches: a line of a Markdown table per row as it is measured, and a JSON file that says on what."""

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from dllm_jax.eval.run.files import write_json

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], Any]]
JsonFile = Annotated[Path | None, tyro.conf.arg(name="json", aliases=("--out", "--output"), metavar="FILE")]
Results = Annotated[Path, tyro.conf.Positional]
RULES = {"l": "---", "r": "---:"}


def run(
    rows: Iterable[Row], columns: Columns, path: Path | None, document: Callable[[list[Row]], Any]
) -> list[Row]:
    """Measures the rows of a bench.

    Each is printed as soon as it is there, and `document` of the rows so far is written, so that an
    interrupted run leaves what it has measured. A row with an "error" shows that in place of the cells that
    it has no fields for.
    """
    measured: list[Row] = []
    for row in rows:
        if not measured:
            print("\n".join(_head(tuple(columns), _align(columns))), flush=True)
        measured.append(row)
        print(_line(_cells(columns, row)), flush=True)
        write(path, document(measured))
    return measured


def _cells(columns: Columns, row: Row) -> list[Any]:
    cells: list[Any] = []
    for cell in columns.values():
        try:
            cells.append(cell(row))
        except KeyError:
            if "error" not in row:
                raise
            cells.append("" if row["error"] in cells else row["error"])
    return cells


def table_of(columns: Columns, rows: Iterable[Row], left: int = 1) -> str:
    """The rows as `run` prints them; the first `left` columns are aligned to the left."""
    return table(tuple(columns), _align(columns, left), (_cells(columns, row) for row in rows))


def table(heads: Sequence[str], align: str, lines: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; `align` has "l" or "r" for every column, `lines` the cells, shown by `str`.

    Raises:
      ValueError: a line has not as many cells as there are heads.
    """
    lines = list(lines)
    if wrong := [line for line in lines if len(line) != len(heads)]:
        raise ValueError(f"{wrong[0]} has not as many cells as {heads}")
    return "\n".join([*_head(heads, align), *map(_line, lines)])


def _align(columns: Columns, left: int = 1) -> str:
    return "l" * left + "r" * (len(columns) - left)


def _head(heads: Sequence[str], align: str) -> list[str]:
    return [_line(heads), _line([RULES[side] for side in align])]


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def write(path: Path | None, document: dict[str, Any]):
    """Writes results, with the commit, atomically and makes the folder; does nothing without a path."""
    if path is not None:
        write_json(path, {"commit": commit()} | document)


def commit() -> str | None:
    """Commit of the checkout that this file is in, with "+" if it has changes; None without git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
