"""Records as tables for a terminal."""

from collections.abc import Mapping

import rich.markup
import rich.table

from dllm_jax.eval.results.schema import Record


def table(records: Mapping[str, Record], title: str) -> rich.table.Table:
    """A row per task, then the average and costs; a column per run."""
    shown = rich.table.Table(title=title, title_justify="left")
    shown.add_column("")
    for name in records:
        shown.add_column(rich.markup.escape(name), justify="right")
    groups = list(dict.fromkeys(group for record in records.values() for group in record["scores"]))
    for group in groups:
        shown.add_row(group, *(_score(record["scores"].get(group)) for record in records.values()))
    if len(groups) > 1:
        shown.add_row("[bold]average[/]", *(_score(record["average"]) for record in records.values()))
    shown.add_section()
    every = [record["totals"] for record in records.values()]
    for label, line in (
        ("requests", lambda t: str(t["requests"])),
        ("failed", lambda t: str(t["failed"])),
        ("forwards per request", lambda t: _ratio(t["forwards"], t["requests"] - t["failed"])),
        ("positions per answer token", lambda t: _ratio(t["computed"], t["tokens"])),
        ("tokens/s", lambda t: _speed(t["tokens_per_second"])),
        ("tokens/s after end-of-text too", lambda t: _speed(t["tokens_with_eos_per_second"])),
        ("seconds, compilation included", lambda t: f"{t['seconds']:.1f}"),
    ):
        shown.add_row(label, *map(line, every))
    return shown


def failures(records: Mapping[str, Record]) -> list[str]:
    """A line for each failed request."""
    return [
        f"{name}: {row['group']} {row['id']} failed: {row['error']}"
        for name, record in records.items()
        for row in record["requests"]
        if row["error"] is not None
    ]


def _score(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _ratio(value: float | int, by: float | int) -> str:
    return f"{value / by:.1f}" if by else "-"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
