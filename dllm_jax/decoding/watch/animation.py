"""Animations of generations side by side; time is the number of computed tokens.

A decoder that computes less is ready sooner; milliseconds would be those of one machine.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dllm_jax.decoding.output import Output
from dllm_jax.decoding.watch.recording import Recording, pieces, printable
from dllm_jax.options import PositiveInt, check_argument, local_path

try:
    import matplotlib.font_manager
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise ImportError(f"dj.animate needs the extras figures and vision ({error})") from error

# Pixels, two to each that is shown; colors of the report on dark screens.
MARGIN, COLUMN, ROW, TOKEN = 40, 7, 9, 23
PANEL, ANSWER, MAP = 134, 182, 246  # from the top
SURFACE, RAISED, LINE, TEXT, MUTED = "#14171b", "#1d2127", "#363c45", "#e7e9ec", "#9aa3af"
NOW, DOT = (126, 160, 255), (11, 13, 16)
FRESH, STALE = np.array([87, 67, 26]), np.array([255, 106, 92])
COLD, WARM = np.array([109, 146, 255]), np.array([255, 154, 61])

WIDEST, TALLEST, LEAST = 1400, 720, 560  # most pixels of a map, and the least width of a panel
LINE_OF_TOKENS = 46

FRAMES, SECONDS, HOLD = 96, 10.0, 4.0


@functools.cache
def font(size: int, family: str = "DejaVu Sans", weight: str = "normal") -> ImageFont.FreeTypeFont:
    """Returns a font that comes with matplotlib."""
    font = matplotlib.font_manager.FontProperties(family=family, weight=weight)
    return ImageFont.truetype(matplotlib.font_manager.findfont(font), size)


MONO, BOLD = font(24, "DejaVu Sans Mono"), font(26, "DejaVu Sans Mono", "bold")
TITLE, SMALL = font(34, weight="bold"), font(22)


@dataclasses.dataclass(frozen=True)
class FramePanel:
    """One decoder's half of the picture.

    Attributes:
      title: Title of the decoder.
      recording: Recording of its run.
      labels: Final text of each position.
    """

    title: str
    recording: Recording
    labels: list[str]

    @classmethod
    def of(cls, title: str, output: Output, tokenizer: Any, sequence: int = 0) -> "FramePanel":
        """The panel of a sequence of a generation that was recorded (`trace=True`)."""
        check_argument(f"outputs[{title!r}]", output, Output, ", which dj.generate returns")
        if output.trace is None:
            raise ValueError("the output has no trace: run generate(..., trace=True)")
        recording = Recording.of(output.trace, sequence)
        last = recording.tokens[-1].tolist()
        known = pieces(tokenizer, set(last))
        return cls(title, recording, ["∎" if known[i].special else printable(known[i].text) for i in last])

    @property
    def spent(self) -> np.ndarray:
        """Positions computed after each step, 0 before the first."""
        return np.concatenate([[0], np.cumsum(self.recording.computed.sum(axis=1))])

    @property
    def column(self) -> int:
        """Pixels across of a position in the map."""
        return max(1, min(COLUMN, WIDEST // self.recording.computed.shape[1]))

    @property
    def row(self) -> int:
        """Pixels down of a step in the map."""
        return max(2, min(ROW, TALLEST // self.recording.steps))

    @property
    def width(self) -> int:
        """Pixels."""
        return max(self.recording.computed.shape[1] * self.column, LEAST)

    @property
    def boxes(self) -> list[tuple[int, int, int]]:
        """Left, top and width of each token of the answer, in lines as long as the panel."""
        places, x, y = [], 0, 0
        for position in self.recording.to_fill.tolist():
            wide = max(TOKEN, int(MONO.getlength(self.labels[position])) + 9)
            if x and x + wide > self.width:
                x, y = 0, y + LINE_OF_TOKENS
            places.append((x, y, wide))
            x += wide
        return places

    @property
    def map_top(self) -> int:
        """Top of the map, under the last line of the answer."""
        return MAP + self.boxes[-1][1]

    @property
    def bottom(self) -> int:
        """Bottom of the map."""
        return self.map_top + self.recording.steps * self.row

    def draw(self, draw: ImageDraw.ImageDraw, left: int, clock: float):
        """Draws the state at a time, in positions computed."""
        step = int(np.searchsorted(self.spent, clock, side="right")) - 1
        draw.text((left, PANEL), self.title, fill=TEXT, font=BOLD)
        ready = step == self.recording.steps
        cost = f"{self.spent[step]:,} computed tokens" + ", ready" * ready
        draw.text((left + self.width, PANEL + 4), cost, TEXT if ready else MUTED, SMALL, anchor="ra")
        self._answer(draw, left, ANSWER, step)
        self._map(draw, left, self.map_top, step)

    def _answer(self, draw: ImageDraw.ImageDraw, left: int, top: int, step: int):
        """The response: masks as boxes, tokens colored by the step that decoded them."""
        decoded_at = self.recording.decoded_at
        for position, (x, y, wide) in zip(self.recording.to_fill.tolist(), self.boxes, strict=True):
            x, y = left + x, top + y
            known = decoded_at[position] <= step
            share = float(decoded_at[position] - 1) / max(self.recording.steps - 1, 1)
            color = _mix(COLD, WARM, share, 0.5) if known else LINE
            draw.rounded_rectangle((x, y, x + wide - 3, y + 40), 5, fill=color)
            if known:
                draw.text((x + wide // 2 - 1, y + 20), self.labels[position], TEXT, MONO, anchor="mm")

    def _map(self, draw: ImageDraw.ImageDraw, left: int, top: int, step: int):
        """Positions across, steps down: computed, or the older the redder what was read of them."""
        age, changed = self.recording.age, self.recording.changed
        column, row, height = self.column, self.row, self.bottom - self.map_top
        draw.rectangle((left, top, left + self.width - 1, top + height - 1), fill=RAISED)
        for t, i in np.ndindex(age[:step].shape):
            x, y = left + i * column, top + t * row
            color = _age(int(age[t, i]))
            draw.rectangle((x, y, x + column - 1, y + row - 2), fill=color)
            if changed[t, i]:
                inset = int(column > 2)
                draw.rectangle((x + inset, y, x + column - 1 - inset, y + row - 2), fill=DOT)
        response = left + int(self.recording.to_fill[0]) * column
        draw.line((response - 1, top - 6, response - 1, top + height + 8), fill=TEXT, width=2)
        draw.text((response - 10, top + height + 4), "question", fill=MUTED, font=SMALL, anchor="ra")
        draw.text((response + 10, top + height + 4), "answer", fill=MUTED, font=SMALL)


def _age(age: int) -> tuple[int, ...]:
    """The color of a position that a step computes (0), or reads as it was so many steps ago."""
    return NOW if age == 0 else _mix(FRESH, STALE, min(age / 8, 1), 0.75)


def _mix(start: np.ndarray, end: np.ndarray, share: float, strength: float = 1.0) -> tuple[int, ...]:
    """A color between two, over the surface."""
    ground = np.array([20, 23, 27])
    mixed = start + share * (end - start)
    return tuple(int(part) for part in ground + strength * (mixed - ground))


def frame_picture(
    panels: list[FramePanel], question: str, clock: float, heading: str = "", caption: str = ""
) -> Image.Image:
    """Draws the whole picture at a time, in computed tokens."""
    height = max(panel.bottom for panel in panels) - MAP
    width = sum(panel.width for panel in panels) + (len(panels) + 1) * MARGIN
    image = Image.new("RGB", (width, height + 370), SURFACE)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width - 1, height + 369), outline=LINE, width=2)
    draw.text((MARGIN, 28), heading, fill=TEXT, font=TITLE)
    fits = int((width - 2 * MARGIN) / MONO.getlength("x"))
    draw.text((MARGIN, 78), printable(question)[:fits].replace("␣", " "), fill=MUTED, font=MONO)
    if caption and any(panel.spent[-1] <= clock for panel in panels):
        draw.text((width - MARGIN, 38), caption, fill=TEXT, font=SMALL, anchor="ra")
    left = MARGIN
    for panel in panels:
        panel.draw(draw, left, clock)
        left += panel.width + MARGIN
    _legend(draw, MARGIN, height + 314)
    return image


def _legend(draw: ImageDraw.ImageDraw, left: int, top: int):
    marks = (
        ("recomputed in this step", [NOW]),
        ("reused from the cache, redder with age", [_age(age) for age in range(1, 9)]),
        ("token unmasked", [DOT]),
    )
    for text, colors in marks:
        for color in colors:
            draw.rectangle((left, top + 4, left + 21, top + 24), fill=color)
            left += 22
        draw.text((left + 12, top), text, fill=MUTED, font=SMALL)
        left += 12 + int(draw.textlength(text, font=SMALL)) + 48
    draw.text((left, top), "steps run downwards", fill=MUTED, font=SMALL)


def save_animation(
    panels: list[FramePanel], path: Path, draw: Callable[[float], Image.Image], frames: int = FRAMES
):
    """Writes the animation, which begins with its last frame: pages that show a still show the result.

    Args:
      panels: What it shows.
      path: Where it goes.
      draw: Draws a frame at a time, in computed tokens.
      frames: Number of frames.
    """
    clocks = np.linspace(0, max(panel.spent[-1] for panel in panels), frames)
    drawn = [draw(clock) for clock in clocks]
    palette = drawn[-1].quantize(128, dither=Image.Dither.NONE)
    flat = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in drawn]
    flat = [flat[-1], *flat[:-1]]
    times = [round(HOLD * 1000)] + [round(SECONDS * 1000 / frames)] * (frames - 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    flat[0].save(path, save_all=True, append_images=flat[1:], duration=times, loop=0, optimize=True)


def animate(
    outputs: Output | Mapping[str, Output],
    tokenizer: Any,
    path: str | os.PathLike[str],
    *,
    question: str = "",
    heading: str = "",
    caption: str = "",
    sequence: int = 0,
    frames: int = FRAMES,
) -> Path:
    """Writes a GIF of generations of one prompt, a panel for each: masks turn into text, caches age.

    It needs the extras `figures` and `vision`.

    Args:
      outputs: Output of `generate(..., trace=True)`, or several by their titles.
      tokenizer: Tokenizer of the checkpoint.
      path: File to write, such as "runs/answer.gif".
      question: Text under the heading, such as the prompt.
      heading: Text at the top.
      caption: Text at the top right once an answer is ready.
      sequence: Index of the sequence in its batch.
      frames: Number of frames.

    Returns:
      The path.

    Raises:
      ValueError: An output without a trace or sequence, or no output.
    """
    named = {"": outputs} if isinstance(outputs, Output) else check_argument("outputs", outputs, Mapping)
    if not named:
        raise ValueError("outputs are empty: pass an output of generate(..., trace=True)")
    check_argument("frames", frames, PositiveInt)
    for name, text in {"question": question, "heading": heading, "caption": caption}.items():
        check_argument(name, text, str)
    panels = [FramePanel.of(title, output, tokenizer, sequence) for title, output in named.items()]
    where = local_path("path", path)
    save_animation(
        panels, where, lambda clock: frame_picture(panels, question, clock, heading, caption), frames
    )
    return where
