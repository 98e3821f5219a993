"""Figures of what was captured, of the kinds with which papers on cache policies argue.

Needs matplotlib (`pip install ".[figures]"`). Each function returns a figure of its own: `savefig` it;
notebooks show it. No state of matplotlib's pyplot is touched.
"""

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dllm_jax.analysis.activations import Capture
from dllm_jax.analysis.similarity import KINDS, Similarity
from dllm_jax.options import check_argument

Kind = Literal["prompt", "decoded", "just_decoded", "masked"]
COLOURS = ("tab:blue", "tab:green", "tab:red", "tab:grey")


def similarity_by_kind(similarity: Similarity) -> Figure:
    """Mean similarity over layers, a line for each kind of position, keys and values side by side."""
    figure, panels = _two_panels("layer")
    for axes, means in zip(panels, similarity.by_kind(), strict=True):
        for kind, colour, line in zip(KINDS, COLOURS, means.T, strict=True):
            axes.plot(similarity.layers, line, "o-", color=colour, label=kind.replace("_", " "))
    panels[0].set_ylabel("cosine similarity to the step before")
    panels[1].legend()
    return figure


def similarity_by_step(similarity: Similarity, kind: Kind = "masked") -> Figure:
    """Layers x steps of one kind of position, as Elastic-Cache's figure 1b; white where there is none.

    With kind="prompt" and "masked" it is dLLM-Cache's point: the prompt hardly changes, the response does.

    Raises:
      ValueError: no such kind.
    """
    column = KINDS.index(check_argument("kind", kind, Kind))
    means = [array[:, :, column].T for array in similarity.by_step()]
    figure, panels = _two_panels("denoising step")
    low = np.nanmin(means) if np.isfinite(means).any() else 0.0
    for axes, values in zip(panels, means, strict=True):
        image = axes.imshow(values, aspect="auto", origin="lower", vmin=low, vmax=1.0, cmap="viridis")
        axes.set_yticks(range(len(similarity.layers)), similarity.layers.tolist())
        _ticks(axes, similarity.steps, both=False)
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label=f"similarity to the step before, {kind.replace('_', ' ')}")
    return figure


def similarity_around_decoding(similarity: Similarity, window: int = 8) -> Figure:
    """Mean similarity before and after each token is decoded, a line for each layer (dKV-Cache, figure 2b).

    Args:
      similarity: of adjacent steps.
      window: steps before and after.
    """
    figure, panels = _two_panels("steps after the one that decoded the token")
    offsets = np.arange(-window, window + 1)
    for axes, means in zip(panels, similarity.around_decoding(window), strict=True):
        for i, (layer, line) in enumerate(zip(similarity.layers, means, strict=True)):
            shade = str(0.75 * (1 - i / max(len(means) - 1, 1)))
            axes.plot(offsets, line, ".-", color=shade, label=f"layer {layer}")
        axes.axvline(0, color="tab:red", alpha=0.4)
    panels[0].set_ylabel("cosine similarity to the step before")
    panels[1].legend(fontsize=7)
    return figure


def similarity_between_steps(matrix: Float[np.ndarray, "t t"], steps: Int[np.ndarray, "t"]) -> Figure:
    """Any two steps against each other (dKV-Cache, figure 2a).

    Args:
      matrix: one layer's of `pairwise_similarity`.
      steps: of the capture that it is of.
    """
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix, origin="lower", cmap="viridis")
    axes.set_xlabel("denoising step")
    axes.set_ylabel("denoising step")
    _ticks(axes, steps, both=True)
    figure.colorbar(image, label="cosine similarity")
    return figure


def attention_map(capture: Capture, step: int = 0, layer: int = 0, sequence: int = 0) -> Figure:
    """Attention of the captured positions to all positions, mean over heads.

    Dark columns are the pivotal tokens that evictions keep (Sparse-dLLM, figure 2; Elastic-Cache, figure 1a).

    Args:
      capture: with attention.
      step: entry of the capture, not the number of the step.
      layer: entry of the capture.
      sequence: of the batch.

    Raises:
      ValueError: attention was not captured, or there is no such entry.
    """
    capture.coordinates("attention")
    assert capture.attention is not None, "coordinates has looked"
    entries = ("step", step), ("layer", layer), ("sequence", sequence)
    for (name, entry), size in zip(entries, capture.attention.shape[:3], strict=True):
        if not 0 <= entry < size:
            raise ValueError(f"{name}={entry} must be an entry of the capture, in [0, {size - 1}]")
    mean = capture.attention[step, layer, sequence].mean(axis=0)
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(mean, aspect="auto", cmap="magma_r", vmin=0)
    axes.set_xlabel("attended position")
    axes.set_ylabel("position")
    at = capture.positions[sequence]
    shown = np.unique(np.linspace(0, len(at) - 1, min(len(at), 12)).astype(int))
    axes.set_yticks(shown, at[shown].tolist())
    axes.set_title(f"layer {capture.layers[layer]}, before step {capture.steps[step]}")
    figure.colorbar(image, label="attention, mean over heads")
    return figure


def trajectory(states: Float[np.ndarray, "t *d"], masked: Bool[np.ndarray, "t"]) -> Figure:
    """The way of one position's states through the steps, by their two principal components (d2Cache, 2a).

    Args:
      states: of one position in one layer, such as `capture.k[:, layer, sequence, position]`.
      masked: steps before which the position was masked: `capture.tokens[:, sequence, position] == mask_id`.

    Raises:
      ValueError: fewer than three steps.
    """
    if len(states) < 3:
        raise ValueError(f"states of {len(states)} steps: a trajectory has at least 3")
    flat = states.reshape(len(states), -1).astype(np.float64)
    centred = flat - flat.mean(axis=0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    x, y = (left * scale)[:, :2].T
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(x, y, color="lightgrey", zorder=1)
    for chosen, colour, label in ((masked, "tab:grey", "masked"), (~masked, "tab:green", "decoded")):
        axes.scatter(x[chosen], y[chosen], s=14, color=colour, label=label, zorder=2)
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    axes.legend()
    return figure


def _two_panels(x: str) -> tuple[Figure, tuple[Axes, Axes]]:
    """Keys on the left, values on the right."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, title in ((left, "keys"), (right, "values")):
        axes.set_title(title)
        axes.set_xlabel(x)
    return figure, (left, right)


def _ticks(axes: Axes, steps: Int[np.ndarray, "t"], both: bool):
    """At most nine steps named along the axis, or both axes, of an image."""
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 9)).astype(int))
    axes.set_xticks(shown, steps[shown].tolist())
    if both:
        axes.set_yticks(shown, steps[shown].tolist())
