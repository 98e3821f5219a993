"""Figures of what bench.policies measured: quality against recomputation and storage.

python -m bench.policies.plots bench/results/policies_cpu.json
"""

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import tyro
from matplotlib.axes import Axes

from bench.policies.every import title
from bench.shared import runner
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json

plt.switch_backend("Agg")
MARKERS = "os^vDPX*<>hpd"
LEGEND = 5  # curves in a line of the legend


def main(results: runner.Results, out: Path = Path("docs/figures")):
    """A figure per workload, policies-NAME.svg."""
    out.mkdir(parents=True, exist_ok=True)
    for name, workload in read_json(results)["models"].items():
        stem = f"policies-{re.sub(r'[^a-z0-9]+', '-', name)}"
        figure = draw(f"{name}, {title(workload)}", workload["rows"])
        # With a salt, names inside of a file do not change from run to run.
        with plt.rc_context({"svg.hashsalt": stem}):
            figure.savefig(out / f"{stem}.svg", metadata={"Date": None})
        plt.close(figure)


def draw(name: str, rows: list[dict[str, Any]]):
    """Quality against the fraction recomputed, and against the pairs stored."""
    names = {row["curve"] for row in rows}
    height = 5 + 0.2 * -(-len(names) // LEGEND)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, height), sharey=True, layout="constrained")
    curves(left, rows, "computed")
    curves(right, rows, "kept_pairs")
    for axes in (left, right):
        axes.plot([], [], color="black", linewidth=5, alpha=0.15, label="Pareto front")
    left.set_xlabel("positions computed, relative to the exact decoder")
    right.set_xlabel("K/V pairs stored per layer and head")
    left.set_ylabel("exact match")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=LEGEND, fontsize=8)
    figure.suptitle(name)
    return figure


def curves(axes: Axes, rows: list[dict[str, Any]], x: str, y: str = "accuracy"):
    """One curve per policy and variant, its settings in order of x, and the front of those with a cache."""
    cached = [(row[x], row[y]) for row in rows if row["kept_pairs"] or x != "kept_pairs"]
    axes.plot(*zip(*front(cached), strict=True), color="black", linewidth=5, alpha=0.15)
    colours = plt.get_cmap("tab20")
    for i, name in enumerate(dict.fromkeys(row["curve"] for row in rows)):
        points = sorted((row[x], row[y]) for row in rows if row["curve"] == name)
        style = {"marker": MARKERS[i % len(MARKERS)], "color": colours(i % 20)}
        axes.plot(*zip(*points, strict=True), label=name, alpha=0.8, **style)
    axes.grid(alpha=0.3)


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, quality) that no other beats: none of at most its cost has at least its quality."""
    best: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or quality > best[-1][1]:
            best.append((cost, quality))
    return best


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
