"""Figures of what was captured, of the kinds with which papers on cache policies argue.

Needs matplotlib (`pip install ".[figures]"`). Each function returns a figure of its own: `savefig` it;
notebooks show it. No state of matplotlib's pyplot is touched.
"""

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import dllm_jax as dj
from examples.similarity import KINDS, Similarity

SIMILARITY = "cosine similarity to the step before"
COLORS = ("tab:blue", "tab:green", "tab:red", "tab:gray")


def similarity_by_kind(similarity: Similarity) -> Figure:
    """Mean similarity over layers, a line for each kind of position, keys and values side by side."""
    figure, panels = _two_panels("layer", SIMILARITY)
    for axes, means in zip(panels, similarity.by_kind(), strict=True):
        axes.set_xticks(similarity.layers[_ticks(similarity.layers)[0]])
        for kind, color, line in zip(KINDS, COLORS, means.T, strict=True):
            axes.plot(similarity.layers, line, "o-", color=color, label=kind.replace("_", " "))
    panels[1].legend()
    return figure


def similarity_by_step(similarity: Similarity, kind: str = "masked") -> Figure:
    """Layers x steps of one of `KINDS`, as Elastic-Cache's figure 1b; blank where there is none.

    With kind="prompt" and "masked" it is dLLM-Cache's point: the prompt hardly changes, the response does.
    """
    means = [array[:, :, KINDS.index(kind)].T for array in similarity.by_step()]
    figure, panels = _two_panels("denoising step", "layer")
    figure.suptitle(f"{kind.replace('_', ' ')} positions")
    low = np.nanmin(means) if np.isfinite(means).any() else 0.0
    for axes, values in zip(panels, means, strict=True):
        image = axes.imshow(values, aspect="auto", origin="lower", vmin=low, vmax=1.0)
        axes.set_yticks(*_ticks(similarity.layers))
        axes.set_xticks(*_ticks(similarity.steps))
    figure.colorbar(image, ax=panels, label=SIMILARITY)
    return figure


def similarity_around_decoding(similarity: Similarity, window: int = 8) -> Figure:
    """Mean similarity up to `window` steps before and after a token is decoded (dKV-Cache, figure 2b)."""
    figure, panels = _two_panels("steps after the one that decoded the token", SIMILARITY)
    layers = similarity.layers
    shades = ScalarMappable(Normalize(layers.min(), layers.max()), "viridis")
    offsets = np.arange(-window, window + 1)
    for axes, means in zip(panels, similarity.around_decoding(window), strict=True):
        for layer, line in zip(layers, means, strict=True):
            axes.plot(offsets, line, ".-", color=shades.to_rgba(layer))
        axes.axvline(0, color="tab:red", alpha=0.4, label="decoded")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[1].legend()
    # A bar of colors holds many layers, of which a legend would hide the lines.
    figure.colorbar(shades, ax=panels, label="layer", ticks=layers[_ticks(layers)[0]])
    return figure


def similarity_between_steps(matrix: Float[np.ndarray, "t t"], steps: Int[np.ndarray, "t"]) -> Figure:
    """Any two steps against each other (dKV-Cache, figure 2a): one layer's of `pairwise_similarity`."""
    figure, axes = _panel("denoising step", "denoising step")
    image = axes.imshow(matrix, origin="lower")
    axes.set_xticks(*_ticks(steps))
    axes.set_yticks(*_ticks(steps))
    figure.colorbar(image, label="cosine similarity")
    return figure


def attention_map(capture: dj.Capture, step: int = 0, layer: int = 0, sequence: int = 0) -> Figure:
    """Attention of the captured positions to all positions, mean over heads.

    Dark columns are the pivotal tokens that evictions keep (Sparse-dLLM, figure 2; Elastic-Cache, figure 1a).

    Args:
      capture: Capture with attention.
      step: Index into the capture, not the number of the step; likewise the others.
      layer: Index into the capture.
      sequence: Index of the sequence in the batch.
    """
    assert capture.attention is not None, "capture with what='attention'"
    figure, axes = _panel("attended position", "position")
    image = axes.imshow(
        capture.attention[step, layer, sequence].mean(axis=0), aspect="auto", cmap="magma_r", vmin=0
    )
    axes.set_yticks(*_ticks(capture.positions[sequence]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"layer {capture.layers[layer]}, before step {capture.steps[step]}")
    figure.colorbar(image, label="attention, mean over heads")
    return figure


def trajectory(states: Float[np.ndarray, "t *d"], masked: Bool[np.ndarray, "t"]) -> Figure:
    """The way of one position's states through the steps, by their two principal components (d2Cache, 2a).

    Args:
      states: States of one position in one layer, such as `capture.k[:, layer, sequence, position]`.
      masked: steps before which the position was masked: `capture.tokens[:, sequence, position] == mask_id`.
    """
    flat = states.reshape(len(states), -1).astype(np.float64)
    left, scale, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    x, y = (left * scale)[:, :2].T
    figure, axes = _panel("first principal component", "second principal component")
    axes.plot(x, y, color="lightgrey", zorder=1)
    for chosen, color, label in ((masked, "tab:gray", "masked"), (~masked, "tab:green", "decoded")):
        axes.scatter(x[chosen], y[chosen], s=14, color=color, label=label, zorder=2)
    axes.legend()
    return figure


def _panel(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _two_panels(x: str, y: str) -> tuple[Figure, tuple[Axes, Axes]]:
    """Keys on the left, values on the right."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, title in ((left, "keys"), (right, "values")):
        axes.set_title(title)
        axes.set_xlabel(x)
    left.set_ylabel(y)
    return figure, (left, right)


def _ticks(numbers: Int[np.ndarray, "t"]) -> tuple[Int[np.ndarray, "s"], list[str]]:
    """At most nine entries of an axis, evenly spaced, and what they are called."""
    shown = np.arange(0, len(numbers), -(-len(numbers) // 9) or 1)
    return shown, [str(number) for number in numbers[shown]]
