"""Records as tables for a terminal, and as heat maps of scores by length and depth."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import rich.console
import rich.table
from jaxtyping import Float
from rich.markup import escape

from dllm_jax.eval.results.comparison import CONFIDENCE, COSTS, RecordComparison, estimate
from dllm_jax.eval.results.schema import EvaluationRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def score_grid(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()
) -> rich.table.Table:
    """A table of plain texts: the first column and those of these names are words, the others numbers."""
    shown = rich.table.Table(title=escape(title), title_justify="left")
    for i, name in enumerate(columns):
        left = not i or name in words
        shown.add_column(escape(name), justify="left" if left else "right", overflow="fold")
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def compared_tables(
    comparison: RecordComparison, names: Sequence[str], confidence: float
) -> list[rich.table.Table]:
    """Tables of scores, and of costs and settings: what they cost, and what may be the reason."""
    head = ("task", "requests", "A", "B", "B - A", f"{confidence:.0%} interval")
    of = lambda d: (f"{100 * d.a:.2f}", f"{100 * d.b:.2f}", f"{100 * d.difference:+.2f}")
    ends = lambda d: f"[{100 * d.low:+.2f}, {100 * d.high:+.2f}]"
    scores = [(d.group, str(d.count), *of(d), ends(d)) for d in comparison.scores]
    other = [(COSTS[name], *(f"{value:.4g}" for value in pair)) for name, pair in comparison.costs.items()]
    other += [(name, *map(str, pair)) for name, pair in comparison.settings.items()]
    columns = ("", *(f"{letter} = {name}" for letter, name in zip("AB", names, strict=True)))
    title = "per request, and what was set differently"
    return [score_grid("scores, times 100", head, scores), score_grid(title, columns, other, columns)]


def record_table(records: Mapping[str, EvaluationRecord], title: str) -> rich.table.Table:
    """A row per task, then the average and costs; a column per run.

    A task's score has its percentile bootstrap interval over requests; `compare` pairs two runs.
    """
    shown = rich.table.Table(title=title, title_justify="left")
    shown.add_column(escape(f"score [{CONFIDENCE:.0%}]"))
    for name in records:
        shown.add_column(escape(name), justify="right")
    groups = list(dict.fromkeys(group for record in records.values() for group in record["scores"]))
    for group in groups:
        of_each = (
            [r["score"] for r in result["requests"] if r["group"] == group] for result in records.values()
        )
        shown.add_row(group, *(escape(percent(estimate([scores])) if scores else "-") for scores in of_each))
    if len(groups) > 1:
        shown.add_row("[bold]average[/]", *(f"{100 * r['average']:.2f}" for r in records.values()))
    shown.add_section()
    # Failed requests have no costs.
    ratio = lambda value, by: f"{value / by:.1f}" if by else "-"
    speed = lambda value: "-" if value is None else f"{value:.0f}"
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        "requests": lambda t: f"{t['requests']}",
        "failed": lambda t: f"{t['failed']}",
        "forward passes per request": lambda t: ratio(t["forwards"], t["requests"] - t["failed"]),
        "computed tokens per answer token": lambda t: ratio(t["computed"], t["tokens"]),
        "tokens/s": lambda t: speed(t["tokens_per_second"]),
        "tokens/s after end-of-text too": lambda t: speed(t["tokens_with_eos_per_second"]),
        "seconds, without compilation": lambda t: f"{t['seconds']:.1f}",
    }
    for label, line in lines.items():
        shown.add_row(label, *(line(record["totals"]) for record in records.values()))
    return shown


def percent(estimated: tuple[float, float, float]) -> str:
    """A mean with its interval (`estimate`), times 100."""
    mean, low, high = (100 * value for value in estimated)
    return f"{mean:.2f} [{low:.1f}, {high:.1f}]"


def line(text: str, style: str | None = None):
    """Prints one line of plain text, such as a path, on standard output; it is not wrapped."""
    rich.console.Console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def record_picture(path: Path, draw: Callable[[], "Figure"]):
    """Writes a figure to a file, or says that it needs matplotlib and leaves it out."""
    if importlib.util.find_spec("matplotlib") is None:
        line(f"{path} is left out: it needs matplotlib, pip install '.[figures]' in a clone")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(path, dpi=150)
    line(f"wrote {path}")


def heatmap(rows: Sequence[Mapping[str, Any]], title: str) -> "Figure":
    """Draws a heat map of mean scores by length and depth."""
    from matplotlib.figure import Figure  # in the `eval` extra

    lengths, depths, scores = cells(rows)
    # Wide enough for every length, high enough for every depth; blank where there was no request.
    figure = Figure(figsize=(2 + 0.7 * len(lengths), 1.6 + 0.35 * len(depths)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(100 * scores, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:g}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
    axes.set(xlabel="length in tokens", ylabel="depth of the needle", title=title)
    for (i, j), score in np.ndenumerate(scores):
        if not np.isnan(score):
            color = "white" if score < 0.6 else "black"  # on viridis, whose high end is light
            axes.text(j, i, f"{100 * score:.0f}", ha="center", va="center", fontsize=11, color=color)
    figure.colorbar(image, label="score")
    return figure


def scale_costs(axes: "Axes", values: Iterable[float]):
    """Labels the x axis with plain numbers, on a logarithmic scale where they span a factor of ten."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

    values = list(values)
    plain = lambda value, _: f"{value:g}" if 1e-3 <= abs(value) < 1e5 or not value else EngFormatter()(value)
    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(plain))


def cells(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[int], list[float | int], Float[np.ndarray, "depths lengths"]]:
    """Lengths, depths and mean scores; NaN where there is no row."""
    scores: dict[tuple[Any, Any], list[float]] = {}
    for row in rows:
        scores.setdefault((row["depth"], row["length"]), []).append(row["score"])
    # A cell may have several requests, or none where lengths and depths are of different runs.
    depths, lengths = (sorted(set(axis)) for axis in zip(*scores, strict=True))
    mean = lambda cell: np.mean(scores[cell]) if cell in scores else np.nan
    return lengths, depths, np.array([[mean((depth, length)) for length in lengths] for depth in depths])
