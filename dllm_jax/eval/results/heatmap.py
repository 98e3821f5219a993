"""A heat map of scores by length and depth."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from dllm_jax.eval.results.schema import GridRow


def cells(
    rows: Sequence[GridRow],
) -> tuple[list[int], list[float | int], Float[np.ndarray, "depths lengths"]]:
    """Lengths, depths and mean scores; NaN where there is no row."""
    lengths, depths = sorted({row["length"] for row in rows}), sorted({row["depth"] for row in rows})
    found = np.full((len(depths), len(lengths)), np.nan)
    for i, depth in enumerate(depths):
        for j, length in enumerate(lengths):
            scores = [r["score"] for r in rows if (r["length"], r["depth"]) == (length, depth)]
            found[i, j] = np.mean(scores) if scores else np.nan
    return lengths, depths, found


def draw(rows: Sequence[GridRow], path: Path, title: str):
    """Writes the heat map as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # in the `eval` extra
    from matplotlib.figure import Figure

    lengths, depths, scores = cells(rows)
    figure = Figure(figsize=(2 + 0.7 * len(lengths), 1.6 + 0.35 * len(depths)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(100 * scores, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:g}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
    axes.set(xlabel="length in tokens", ylabel="depth of the needle", title=title)
    for (i, j), score in np.ndenumerate(scores):
        if not np.isnan(score):
            axes.text(j, i, f"{100 * score:.0f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, label="score")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
