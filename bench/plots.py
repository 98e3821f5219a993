"""Draws what bench/policies.py measured: quality against the share recomputed, and against storage.

python bench/plots.py bench/results/policies_cpu.json --out docs
"""

import json
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tyro
from matplotlib.axes import Axes

MARKERS = "os^vDPX*<>hpd"


def main(results: Annotated[Path, tyro.conf.Positional], out: Path = Path("docs")):
    """One figure per model, as PNG and SVG: policies-MODEL."""
    report = json.loads(results.read_text())
    for name, model in report["models"].items():
        quality = "agreement" if model["rows"][0]["accuracy"] is None else "accuracy"
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True)
        curves(left, model["rows"], "computed", quality)
        curves(right, model["rows"], "cache_bytes_per_row", quality)
        left.set_xlabel("positions recomputed, share of the exact decoder's")
        right.set_xlabel("cache, bytes per row")
        left.set_ylabel("exact match" if quality == "accuracy" else "tokens equal to the exact decoder's")
        right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
        shape = f"prompts {model['prompt']}, length {model['length']}"
        figure.suptitle(f"{name}, {shape}, {report['dtype']}, {report['device']}, jax {report['jax']}")
        figure.tight_layout()
        for suffix in ("png", "svg"):
            figure.savefig(out / f"policies-{name}.{suffix}", dpi=120, metadata=_undated(suffix))
        plt.close(figure)


def curves(axes: Axes, rows: list[dict], x: str, y: str):
    """One curve per policy family, its settings in order of x."""
    for i, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
        points = sorted((row[x], row[y]) for row in rows if row["family"] == family)
        axes.plot(*zip(*points, strict=True), marker=MARKERS[i % len(MARKERS)], label=family, alpha=0.8)
    axes.grid(alpha=0.3)


def _undated(suffix: str) -> dict:
    return {"Date": None} if suffix == "svg" else {}


if __name__ == "__main__":
    tyro.cli(main)
