"""The denoising grid of a terminal: a line per step, in which masks turn into text.

rich is imported when something is drawn: importing it takes a third of the time that this package takes.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from dllm_jax.decoding.watch.recording import Recording, pieces, printable

if TYPE_CHECKING:
    import rich.text

END, MASK = "∎", "·"
COLD, WARM = np.array([60, 90, 220]), np.array([230, 120, 30])  # first and last step; sure and unsure
MARGIN = 6  # the step's number


def grid(
    recording: Recording,
    tokenizer: Any,
    width: int | None = None,
    confidence: bool = False,
    counts: bool = False,
) -> "rich.text.Text":
    """A picture with one line per step of what a generation fills.

    Args:
      recording: Recording of one sequence.
      tokenizer: the checkpoint's; special tokens, such as end-of-text, are shown as END. None shows ids.
      width: columns of the terminal: what is longer is cut into parts, each of which has the lines of the
        steps that change it. None is as wide as it needs.
      confidence: colors tokens by the confidence with which they were decoded, not by the step; a negative
        entropy by its exponential.
      counts: Whether lines that are not cut into parts end with the number of unmasked tokens.
    """
    import rich.cells
    import rich.text

    known = pieces(tokenizer, np.unique(recording.tokens[:, recording.to_fill]).tolist())
    labels = {i: END if piece.special else printable(piece.text) for i, piece in known.items()}
    labels[recording.mask_id] = MASK
    size = {i: rich.cells.cell_len(label) for i, label in labels.items()}
    filled = recording.tokens[:, recording.to_fill]

    # As wide as the widest token that any step has there, so that the lines stand below each other.
    columns = np.array([max(size[i] for i in column) for column in filled.T.tolist()], int)
    # Where between COLD (0) and WARM (1) each token stands after each step; NaN for what no step decoded.
    at, score = recording.unmasked
    sure = np.exp(score) if recording.by_entropy else score
    value = 1 - np.clip(sure, 0, 1) if confidence else (at - 1) / max(recording.steps - 1, 1)
    shares = np.where(at > 0, value, np.nan)[:, recording.to_fill]
    text, parts = rich.text.Text(), _parts(columns, width)
    undecided = recording.undecided[:, recording.to_fill]
    unmasked = np.sum(~undecided, axis=1)
    for part in parts:
        for step in _lines(filled[:, part], width):
            text.append(f"{step:4d}  ", style="dim")
            for j in part:
                token = int(filled[step, j])
                style = _style(undecided[step, j], shares[step, j])
                label, gap = labels[token], int(columns[j]) - size[token]
                between = " " if j < part[-1] else ""
                text.append(" " * (gap // 2) + label + " " * (gap - gap // 2) + between, style=style)
            text.append(f"{unmasked[step]:5d}\n" if counts and len(parts) == 1 else "\n", style="dim")
        text.append("\n" if part[-1] + 1 < len(columns) else "")
    return text


def _parts(columns: np.ndarray, width: int | None) -> list[range]:
    """Neighboring columns that fit the width together; one that is wider than it stands alone."""
    parts, start, used = [], 0, MARGIN
    for j, column in enumerate(columns):
        if width is not None and j > start and used + column > width:
            parts.append(range(start, j))
            start, used = j, MARGIN
        used += int(column) + 1
    return [*parts, range(start, len(columns))] if len(columns) else []


def _lines(part: np.ndarray, width: int | None) -> list[int]:
    """The steps that a part has lines of: all, or where it is cut, the first and those that change it."""
    if width is None:
        return list(range(len(part)))
    changes = np.any(part[1:] != part[:-1], axis=1)
    return [0, *(np.flatnonzero(changes) + 1).tolist()]


def _style(masked: bool, share: float) -> str:
    if masked or np.isnan(share):
        return "dim"
    return f"bold rgb({','.join(str(int(c)) for c in COLD + share * (WARM - COLD))})"
