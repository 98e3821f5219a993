"""Draws a GIF of generations side by side: by default the picture at the head of the README.

    python examples/animate.py --out docs/figures/side-by-side.gif
    python examples/animate.py --model GSAI-ML/LLaDA-8B-Instruct --prompt "Why is the sky blue?" \\
        --length 64 --block 16 --policy DualCache "DKVDecode(8)" --sampler "Threshold(0.9)" --out answer.gif

All policies answer the same question. Time is the number of computed tokens, so a decoder that computes less
is ready sooner; milliseconds would be those of one machine. Needs the extras `figures` and `vision`.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import matplotlib.font_manager
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import dllm_jax as dj
from dllm_jax.decoding.watch.recording import Recording, pieces, printable
from dllm_jax.demo import trains
from dllm_jax.published import expressions

# Pixels, two to each that is shown; colours of the report on dark screens.
MARGIN, COLUMN, ROW, TOKEN = 40, 7, 9, 23
PANEL, ANSWER, MAP = 134, 182, 246  # from the top
SURFACE, RAISED, LINE, TEXT, MUTED = "#14171b", "#1d2127", "#363c45", "#e7e9ec", "#9aa3af"
NOW, DOT = (126, 160, 255), (11, 13, 16)
FRESH, STALE = np.array([87, 67, 26]), np.array([255, 106, 92])
COLD, WARM = np.array([109, 146, 255]), np.array([255, 154, 61])

WIDEST, TALLEST, LEAST = 1400, 720, 560  # most pixels of a map, and the least width of a panel
LINE_OF_TOKENS = 46

FRAMES, SECONDS, HOLD = 96, 10.0, 4.0
HEADING = "By which stops does the train go from Paris?"


def font(size: int, family: str = "DejaVu Sans", weight: str = "normal") -> ImageFont.FreeTypeFont:
    """A font that comes with matplotlib."""
    found = matplotlib.font_manager.FontProperties(family=family, weight=weight)
    return ImageFont.truetype(matplotlib.font_manager.findfont(found), size)


MONO, BOLD = font(24, "DejaVu Sans Mono"), font(26, "DejaVu Sans Mono", "bold")
TITLE, SMALL = font(34, weight="bold"), font(22)


@dataclasses.dataclass(frozen=True)
class Panel:
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
    def of(cls, title: str, output: dj.Output, tokenizer: Any) -> "Panel":
        """The panel of a recorded generation of one sequence."""
        recording = Recording.of(output.trace, 0)
        last = recording.tokens[-1].tolist()
        known = pieces(tokenizer, set(last))
        return cls(title, recording, ["∎" if known[i].special else printable(known[i].text) for i in last])

    @property
    def spent(self) -> np.ndarray:
        """Positions computed after each step, 0 before the first."""
        return np.concatenate([[0], np.cumsum(self.recording.computed.sum(axis=1))])

    @property
    def stops(self) -> str:
        """Describes the answer in words."""
        answer = "".join(self.labels[i] for i in self.recording.to_fill)
        return ", ".join(trains.route(answer)[1:])

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
        found, x, y = [], 0, 0
        for position in self.recording.to_fill.tolist():
            wide = max(TOKEN, int(MONO.getlength(self.labels[position])) + 9)
            if x and x + wide > self.width:
                x, y = 0, y + LINE_OF_TOKENS
            found.append((x, y, wide))
            x += wide
        return found

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
        """The response: masks as boxes, tokens coloured by the step that decoded them."""
        decoded_at = self.recording.decoded_at
        for position, (x, y, wide) in zip(self.recording.to_fill.tolist(), self.boxes, strict=True):
            x, y = left + x, top + y
            known = decoded_at[position] <= step
            share = float(decoded_at[position] - 1) / max(self.recording.steps - 1, 1)
            colour = _mix(COLD, WARM, share, 0.5) if known else LINE
            draw.rounded_rectangle((x, y, x + wide - 3, y + 40), 5, fill=colour)
            if known:
                draw.text((x + wide // 2 - 1, y + 20), self.labels[position], TEXT, MONO, anchor="mm")

    def _map(self, draw: ImageDraw.ImageDraw, left: int, top: int, step: int):
        """Positions across, steps down: computed, or the older the redder what was read of them."""
        age, changed = self.recording.age, self.recording.changed
        column, row, height = self.column, self.row, self.bottom - self.map_top
        draw.rectangle((left, top, left + self.width - 1, top + height - 1), fill=RAISED)
        for t, i in np.ndindex(age[:step].shape):
            x, y = left + i * column, top + t * row
            colour = _age(int(age[t, i]))
            draw.rectangle((x, y, x + column - 1, y + row - 2), fill=colour)
            if changed[t, i]:
                inset = int(column > 2)
                draw.rectangle((x + inset, y, x + column - 1 - inset, y + row - 2), fill=DOT)
        response = left + int(self.recording.to_fill[0]) * column
        draw.line((response - 1, top - 6, response - 1, top + height + 8), fill=TEXT, width=2)
        draw.text((response - 10, top + height + 4), "question", fill=MUTED, font=SMALL, anchor="ra")
        draw.text((response + 10, top + height + 4), "answer", fill=MUTED, font=SMALL)


def _age(age: int) -> tuple[int, ...]:
    """The colour of a position that a step computes (0), or reads as it was so many steps ago."""
    return NOW if age == 0 else _mix(FRESH, STALE, min(age / 8, 1), 0.75)


def _mix(start: np.ndarray, end: np.ndarray, share: float, strength: float = 1.0) -> tuple[int, ...]:
    """A colour between two, over the surface."""
    ground = np.array([20, 23, 27])
    mixed = start + share * (end - start)
    return tuple(int(part) for part in ground + strength * (mixed - ground))


def picture(panels: list[Panel], question: str, clock: float, heading: str = HEADING) -> Image.Image:
    """Draws the whole picture at a time, in computed tokens."""
    height = max(panel.bottom for panel in panels) - MAP
    width = sum(panel.width for panel in panels) + (len(panels) + 1) * MARGIN
    image = Image.new("RGB", (width, height + 370), SURFACE)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width - 1, height + 369), outline=LINE, width=2)
    draw.text((MARGIN, 28), heading, fill=TEXT, font=TITLE)
    fits = int((width - 2 * MARGIN) / MONO.getlength("x"))
    draw.text((MARGIN, 78), printable(question)[:fits].replace("␣", " "), fill=MUTED, font=MONO)
    ready = [panel for panel in panels if panel.spent[-1] <= clock]
    if ready and heading == HEADING:
        draw.text((width - MARGIN, 38), ready[0].stops, fill=TEXT, font=SMALL, anchor="ra")
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
    for text, colours in marks:
        for colour in colours:
            draw.rectangle((left, top + 4, left + 21, top + 24), fill=colour)
            left += 22
        draw.text((left + 12, top), text, fill=MUTED, font=SMALL)
        left += 12 + int(draw.textlength(text, font=SMALL)) + 48
    draw.text((left, top), "steps run downwards", fill=MUTED, font=SMALL)


def save(panels: list[Panel], question: str, out: Path, heading: str = HEADING, frames: int = FRAMES):
    """Writes the animation, which begins with its last frame: pages that show a still show the result."""
    clocks = np.linspace(0, max(panel.spent[-1] for panel in panels), frames)
    drawn = [picture(panels, question, clock, heading) for clock in clocks]
    palette = drawn[-1].quantize(128, dither=Image.Dither.NONE)
    flat = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in drawn]
    flat = [flat[-1], *flat[:-1]]
    times = [round(HOLD * 1000)] + [round(SECONDS * 1000 / frames)] * (frames - 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    flat[0].save(out, save_all=True, append_images=flat[1:], duration=times, loop=0, optimize=True)


def main(arguments: argparse.Namespace):
    """Answers the question under every policy, and draws how."""
    bundled = arguments.model in dj.bundled.NAMES
    path = dj.bundled.path(arguments.model) if bundled else arguments.model
    model, tokenizer = dj.load(path, dtype=arguments.dtype), dj.load_tokenizer(path)
    chat = [{"role": "user", "content": arguments.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    options: dict[str, Any] = dict(length=arguments.length, block=arguments.block, trace=True)
    options |= dict(sampler=expressions.sampler(arguments.sampler), key=jax.random.key(0))
    panels = []
    for text in arguments.policy:
        out = dj.generate(model, [prompt], policy=expressions.policy(text), **options)
        panels.append(Panel.of("Policy(), exact" if text == "Policy()" else text, out, tokenizer))
    heading = HEADING if arguments.prompt == trains.QUESTION else f"{Path(arguments.model).name} answers"
    save(panels, arguments.prompt, arguments.out, heading)
    print(f"wrote {arguments.out}, {arguments.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llada", help="bundled model, directory or hub id")
    parser.add_argument("--dtype", help="dtype of the weights; default: the checkpoint's")
    parser.add_argument("--prompt", default=trains.QUESTION, help="message of the user")
    parser.add_argument("--policy", nargs="+", default=["Policy()", "DualCache()"], help="constructor calls")
    parser.add_argument("--sampler", default="Confidence()", help="constructor call")
    parser.add_argument("--length", type=int, default=32, help="number of tokens to generate")
    parser.add_argument("--block", type=int, default=8, help="block length")
    parser.add_argument("--out", type=Path, default=Path("runs/side-by-side.gif"))
    main(parser.parse_args())
