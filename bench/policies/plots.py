"""Figures and tables of what bench.policies measured: quality against recomputation and storage.

python -m bench.policies.plots bench/results/policies_cpu.json --out docs
"""

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tyro
from matplotlib.axes import Axes

from bench.policies import orderings
from bench.shared import runner
from dllm_jax.eval.run.files import read_json

MARKERS = "os^vDPX*<>hpd"
LEGEND = 5  # curves in a line of the legend
HEAD = """\
# Policies measured

Made by `bench.policies` and its `plots` from [{source}](../../{source}): {device}, jax {jax}, {dtype}.
`exact match`: right answers, with their 95 % interval (Wilson's); `tokens`: right tokens of the answers, end
of turn included; `as exact`: tokens equal to those of the exact decoder with the same sampler, block and
steps; `computed`: positions that went through the network, relative to the first line; `kept`: K/V pairs
stored per layer and head, and `cache`: bytes of the cache, both per prompt.
"""
ORDERINGS = """
## What the papers found

Exact match of both sides of comparisons that the papers make. Claims that nothing much is lost hold where at
least 99 % of the other's accuracy is kept (94 % where the paper says so). `within noise`: closer to what
would decide than the 95 % interval of the difference, as if the two sides had answered different prompts.
`same computation`: the sides cannot differ there, since nothing lies behind the block. `both at the floor`:
neither is ever right. These are models of half a million parameters on synthetic tasks: they can confirm a
mechanism, not a number.
"""


def main(results: runner.Results, out: Path = Path("docs")):
    """A figure per workload, figures/policies-NAME as PNG and SVG, and a page, background/benchmarks.md."""
    report = read_json(results)
    for folder in ("figures", "background"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    where = {key: report[key] for key in ("device", "jax", "dtype")}
    pages = [HEAD.format(source=results.as_posix(), **where)]
    for name, workload in report["models"].items():
        stem = f"policies-{re.sub(r'[^a-z0-9]+', '-', name)}"
        figure = draw(f"{name}, {title(workload)}", workload["rows"])
        # With a salt, names inside of a file do not change from run to run.
        with matplotlib.rc_context({"svg.hashsalt": stem}):
            for suffix, metadata in (("png", {}), ("svg", {"Date": None})):
                figure.savefig(out / "figures" / f"{stem}.{suffix}", dpi=110, metadata=metadata)
        plt.close(figure)
        pages += [
            f"\n## {name}\n",
            f"{title(workload)}.\n",
            f"![{name}](../figures/{stem}.svg)\n",
            table(workload),
        ]
    pages += [ORDERINGS, orderings.table(report["models"])]
    (out / "background" / "benchmarks.md").write_text("\n".join(pages) + "\n")


def title(workload: dict[str, Any]) -> str:
    """Shapes in words."""
    count, prompt = workload["prompt"]
    model = f"{workload['layers']} layers of width {workload['width']}, {count} prompts of {prompt} tokens"
    return f"{model}, length {workload['length']}, block {workload['block']}"


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


def exact_match(row: dict[str, Any]) -> str:
    """The share of right answers and its confidence interval."""
    low, high = row["interval"]
    return f"{row['accuracy']:.1%} ({100 * low:.0f} to {100 * high:.0f})"


COLUMNS: runner.Columns = {
    "policy": lambda row: f"`{row['policy']}`",
    "sampler": lambda row: f"`{row['sampler'].split('(')[0]}`",
    "block": lambda row: row["block"],
    "steps": lambda row: row["steps"],
    "exact match": exact_match,
    "tokens": lambda row: f"{row['token_accuracy']:.1%}",
    "as exact": lambda row: f"{row['agreement']:.1%}",
    "forwards": lambda row: f"{row['forwards']:.1f}",
    "computed": lambda row: f"{row['computed']:.1%}",
    "kept": lambda row: f"{row['kept_pairs']:.0f}",
    "cache KiB": lambda row: f"{row['cache_bytes'] / 1024:.0f}",
}


def table(workload: dict[str, Any]) -> str:
    """All rows of a workload."""
    return runner.table_of(COLUMNS, workload["rows"], left=2)


if __name__ == "__main__":
    tyro.cli(main)
