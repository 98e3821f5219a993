"""The demonstration's table and denoising grid, for a terminal."""

import re
from typing import Any

import numpy as np
import rich.box
import rich.table
import rich.text
from jaxtyping import Int

from dllm_jax.demo.measure import Row

END = "∎"
COLD, WARM = np.array([60, 90, 220]), np.array([230, 120, 30])  # first and last step


def table(rows: list[Row], title: str) -> rich.table.Table:
    """A table with one row per policy and sampler."""
    shown = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
    shown.add_column("policy", no_wrap=True)
    shown.add_column("sampler", no_wrap=True)
    for name in (
        "exact\nmatch",
        "for-\nwards",
        "pos. /\ntoken",
        "tokens\n/ s",
        "speed-\nup",
        "com-\npile s",
    ):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.policy.removesuffix("()"),
            re.sub(r"\((\w+=)?", "\n(", row.sampler.removesuffix("()"), count=1),
            f"{row.accuracy:.1%}",
            f"{row.forwards:.1f}",
            f"{row.computed:.1f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.speed_up:.2f}x",
            f"{row.compile_seconds:.1f}",
        )
    return shown


def order(tokens: Int[np.ndarray, "t_plus_1 r"], mask_id: int) -> Int[np.ndarray, "r"]:
    """The step (from 1) at which each position of one response was decoded."""
    return np.argmax(tokens != mask_id, axis=0)


def grid(tokens: Int[np.ndarray, "t_plus_1 r"], mask_id: int, tokenizer: Any) -> rich.text.Text:
    """A picture with one line per step of a response; tokens are coloured by the step that decoded them.

    Special tokens, such as end-of-text, are shown as END.
    """
    decoded_at, last = order(tokens, mask_id), len(tokens) - 1
    pieces = [tokenizer.convert_ids_to_tokens(int(i)) for i in tokens[-1]]
    pieces = [END if piece in tokenizer.all_special_tokens else piece for piece in pieces]
    widths = [len(piece) for piece in pieces]
    text = rich.text.Text()
    for step in range(last + 1):
        text.append(f"{step:4d}  ", style="dim")
        for piece, width, decoded in zip(pieces, widths, decoded_at, strict=True):
            known = 0 < decoded <= step
            style = f"bold rgb({_colour(int(decoded), last)})" if known else "dim"
            text.append((piece if known else "·").center(width) + " ", style=style)
        text.append("\n")
    return text


def _colour(step: int, last: int) -> str:
    fraction = (step - 1) / max(last - 1, 1)
    return ",".join(str(int(c)) for c in COLD + fraction * (WARM - COLD))
