"""Prints what `dllm_jax.roofline` predicts for generations on hardware that is not at hand.

python -m bench.roofline
python -m bench.roofline --models llada-8b --hardware h100 --policies DualCache MaskKV --prompts 1024
python -m bench.roofline --batches 1 --markdown     (the tables of docs/performance.md)
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import tyro

from bench.roofline.forecast import Forecast, rows
from bench.shared import markdown, report
from dllm_jax.roofline import HARDWARE

HEADINGS = (
    "policy",
    "prompt",
    "batch",
    "whole",
    "part",
    "ms/token",
    "x exact",
    "waits",
    "cache",
    "all GB",
    "fits",
)


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row, in the order of HEADINGS."""
    part = "-" if row["part_ms"] is None else short(row["part_ms"])
    return [
        row["policy"],
        str(row["prompt"]),
        str(row["batch"]),
        short(row["whole_ms"]),
        part,
        short(row["ms_per_token"]),
        short(row["over_exact"]),
        f"{row['memory_bound']:.0%}",
        f"{row['cache_gb']:.1f}",
        f"{row['memory_gb']:.0f}",
        "yes" if row["fits"] else "no",
    ]


def short(value: float) -> str:
    """About three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def print_tables(console: rich.console.Console, asked: Forecast, found: list[dict[str, Any]]):
    """One table per model and hardware."""
    for model in asked.models:
        for name in asked.hardware:
            chip = HARDWARE[name].times(asked.chips)
            title = (
                f"{model} on {chip.name}, length {asked.grid.length}, block {asked.grid.block}, {asked.dtype}"
            )
            table = rich.table.Table(title=title)
            for heading in HEADINGS:
                table.add_column(heading, justify="left" if heading == "policy" else "right")
            mine = [r for r in found if (r["model"], r["hardware"]) == (model, name)]
            for policy in dict.fromkeys(r["policy"] for r in mine):
                for r in mine:
                    if r["policy"] == policy:
                        table.add_row(*cells(r))
                table.add_section()
            console.print(table)
    console.print(
        "whole, part: milliseconds of a whole-canvas step and, on average, of the others; ms/token: per "
        "token of the batch; x exact: speed over the exact decoder's; waits: share of the time that is "
        "memory-bound. Lower bounds at the full rates of the data sheets, see dllm_jax/roofline."
    )


def print_markdown(asked: Forecast, found: list[dict[str, Any]]):
    """Per model, hardware and batch: ms of the partial step, ms per token, ratio over the exact decoder."""
    heads = ("policy", *(f"prompt {prompt}" for prompt in asked.grid.prompts))
    for model in asked.models:
        for name in asked.hardware:
            for batch in asked.grid.batches:
                about = {"model": model, "hardware": name, "batch": batch}
                mine = [r for r in found if about.items() <= r.items()]
                lines = [
                    (f"`{policy}`", *(markdown_cell(r) for r in mine if r["policy"] == policy))
                    for policy in dict.fromkeys(r["policy"] for r in mine)
                ]
                print(f"\n{model}, {HARDWARE[name].times(asked.chips).name}, batch {batch}:\n")
                print(markdown.table(heads, "l" + "r" * len(asked.grid.prompts), lines))


def markdown_cell(row: dict[str, Any]) -> str:
    """Partial step (exact decoder: whole step) / ms per token (ratio); a star if it does not fit."""
    step = row["whole_ms"] if row["part_ms"] is None else row["part_ms"]
    text = f"{short(step)} / {short(row['ms_per_token'])} ({short(row['over_exact'])}x)"
    return text if row["fits"] else text + " *"


def main(
    asked: Annotated[Forecast, tyro.conf.arg(name="")],
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    as_markdown: Annotated[bool, tyro.conf.arg(name="markdown")] = False,
):
    """Prints the predictions, with --markdown as short tables."""
    found = list(rows(asked))
    if as_markdown:
        print_markdown(asked, found)
    else:
        print_tables(rich.console.Console(width=100), asked, found)
    if json_file:
        sources = {name: dataclasses.asdict(HARDWARE[name]) for name in asked.hardware}
        report.write(json_file, {"hardware": sources}, rows=found)


if __name__ == "__main__":
    tyro.cli(main)
