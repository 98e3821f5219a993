"""Pictures for questions with one right answer: digits and shapes in colours, on cells of a dark square."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

CELL = 8  # pixels along each side of a cell; glyphs are smaller, and are put anywhere in theirs
CELLS = 8  # along each side of a picture
SIDE = CELL * CELLS
COLOURS = {  # with names that begin differently
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
_SHAPES = """
11111 00100 10001 11111
11111 00100 10001 10001
11111 01110 01010 10001
11111 01110 00100 10001
11111 01110 01010 10001
11111 11111 10001 10001
11111 11111 10001 11111
"""
SHAPES = ("square", "triangle", "cross", "frame")


class Mark(NamedTuple):
    """Something drawn in a cell.

    Attributes:
      glyph: a digit, or the name of one of `SHAPES`.
      colour: the name of one of `COLOURS`.
      row: of the cell, from 0.
      column: of the cell, from 0.
    """

    glyph: str
    colour: str
    row: int
    column: int


def _glyphs(rows: str) -> list[Bool[np.ndarray, "7 5"]]:
    lines = [line.split() for line in rows.split("\n") if line]
    return [np.array([[dot == "1" for dot in row] for row in glyph]) for glyph in zip(*lines, strict=True)]


GLYPHS = dict(zip("0123456789", _glyphs(_DIGITS), strict=True)) | dict(
    zip(SHAPES, _glyphs(_SHAPES), strict=True)
)


def picture(rng: np.random.Generator, marks: list[Mark]) -> UInt8[np.ndarray, "side side 3"]:
    """Draws marks, each at a random place within its cell, on a dark background with noise."""
    image = np.empty((SIDE, SIDE, 3))
    # One dark colour behind everything, in which no mark can hide.
    image[:] = rng.integers(BACKGROUND + 1, size=3)
    for mark in marks:
        # A glyph is smaller than its cell, and may be anywhere within.
        glyph = GLYPHS[mark.glyph]
        top = mark.row * CELL + rng.integers(CELL - glyph.shape[0] + 1)
        left = mark.column * CELL + rng.integers(CELL - glyph.shape[1] + 1)
        image[top : top + glyph.shape[0], left : left + glyph.shape[1]][glyph] = COLOURS[mark.colour]
    return np.clip(image + rng.normal(0, NOISE, image.shape), 0, 255).astype(np.uint8)
