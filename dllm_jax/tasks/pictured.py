"""Questions about pictures of colored digits on a dark square, for models with a vision tower."""

import dataclasses
from typing import Annotated

import numpy as np
from annotated_types import Interval
from jaxtyping import UInt8
from typing_extensions import override

from dllm_jax.tasks.base import DIGITS, ChecksumSplit, Example

CELL = 8  # pixels along each side of a cell; glyphs are smaller, and are put anywhere in theirs
CELLS = 8  # along each side of a picture
SIDE = CELL * CELLS
COLORS = {  # with names that begin differently
    "red": (225, 60, 60),
    "green": (60, 200, 70),
    "blue": (80, 110, 255),
    "yellow": (225, 205, 50),
    "white": (235, 235, 235),
}
BACKGROUND = 40  # the brightest a background is, of 255
NOISE = 12  # standard deviation of every pixel

# Five by seven dots each, row by row.
_DIGITS = """
01110 00100 01110 01110 00010 11111 00110 11111 01110 01110
10001 01100 10001 10001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00010 00110 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
"""


_ROWS = [line.split() for line in _DIGITS.strip().split("\n")]
GLYPHS = {
    digit: np.array([[dot == "1" for dot in row] for row in glyph])
    for digit, glyph in zip(DIGITS, zip(*_ROWS, strict=True), strict=True)
}


def picture(
    rng: np.random.Generator, marks: list[tuple[str, str, int, int]]
) -> UInt8[np.ndarray, "side side 3"]:
    """Draws digits, each at a random place within its cell, on a dark background with noise.

    Args:
      rng: Random generator of background, places and noise.
      marks: a digit, its color, and row and column of its cell, from 0, of each.
    """
    image = np.empty((SIDE, SIDE, 3))
    # One dark color for the background, in which no mark can hide.
    image[:] = rng.integers(BACKGROUND + 1, size=3)
    for digit, color, row, column in marks:
        # A glyph is smaller than its cell, and may be anywhere within.
        glyph = GLYPHS[digit]
        top = row * CELL + rng.integers(CELL - glyph.shape[0] + 1)
        left = column * CELL + rng.integers(CELL - glyph.shape[1] + 1)
        image[top : top + glyph.shape[0], left : left + glyph.shape[1]][glyph] = COLORS[color]
    return np.clip(image + rng.normal(0, NOISE, image.shape), 0, 255).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class ReadNumbers(ChecksumSplit):
    """`value r` is answered with the red number of the picture; the size is how many numbers it shows.

    Numbers have colors of their own, which questions call by their initials, and each stands in a row of
    cells of its own. A decoder has to find the asked one among all, and to read its digits from as many image
    tokens.

    Attributes:
      colors: Number of different colors.
      digits: length of a number.
      scattered: numbers begin anywhere in their row; otherwise all in one column, which tells their digits
        apart by column.
    """

    colors: Annotated[int, Interval(ge=1, le=len(COLORS))] = len(COLORS)
    digits: Annotated[int, Interval(ge=1, le=CELLS)] = 3
    scattered: bool = False

    name = "read"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer, whatever the size."""
        return self.digits

    @override
    def _sizes(self) -> tuple[int, float, str]:
        return 1, self.colors, "the number of colors"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        # Numbers differ in color and row, so that a question names exactly one of them.
        colors = rng.permutation(list(COLORS)[: self.colors])[:size].tolist()
        rows = rng.permutation(CELLS)[:size].tolist()
        numbers = ["".join(DIGITS[i] for i in drawn) for drawn in rng.integers(10, size=(size, self.digits))]
        marks = []
        for color, row, number in zip(colors, rows, numbers, strict=True):
            # Digits stand in neighboring cells of their row.
            room = CELLS - self.digits
            first = int(rng.integers(room + 1)) if self.scattered else room // 2
            marks += [(digit, color, row, first + i) for i, digit in enumerate(number)]
        return Example(f"value {colors[0][0]}", numbers[0], picture(rng, marks))
