"""Questions about pictures, for models with a vision tower: answers stand in few of an image's rows."""

import dataclasses
from typing import Annotated

import numpy as np
from annotated_types import Interval
from typing_extensions import override

from dllm_jax.tasks.base import DIGITS, ChecksumSplit, Example
from dllm_jax.tasks.drawing import CELLS, COLOURS, SHAPES, Mark, picture

MOST_COUNTED = 9  # an answer is one digit


@dataclasses.dataclass(frozen=True)
class ReadNumbers(ChecksumSplit):
    """`value r` is answered with the red number of the picture; the size is how many numbers it shows.

    Numbers have colours of their own, which questions call by their initials, and each stands in a row of
    cells of its own. A decoder has to find the asked one among all, and to read its digits from as many image
    tokens. Several are asked for by a form, which the answer fills in: `r=???;b=???;` is answered with
    `r=407;b=211;`.

    Attributes:
      colours: how many different colours occur.
      digits: length of a number.
      asked: how many of the numbers are asked for.
      scattered: numbers begin anywhere in their row; otherwise all in one column, which tells their digits
        apart by column.
    """

    colours: Annotated[int, Interval(ge=1, le=len(COLOURS))] = len(COLOURS)
    digits: Annotated[int, Interval(ge=1, le=CELLS)] = 3
    asked: Annotated[int, Interval(ge=1, le=len(COLOURS))] = 1
    scattered: bool = False

    name = "read"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer, whatever the size."""
        return self.digits if self.asked == 1 else self.asked * (self.digits + 3)

    @property
    @override
    def _sizes(self) -> tuple[int, float, str]:
        return self.asked, self.colours, "from what is asked for to the number of colours"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        # Numbers differ in colour and row, so that a question names exactly one of them.
        colours = rng.permutation(list(COLOURS)[: self.colours])[:size].tolist()
        rows = rng.permutation(CELLS)[:size].tolist()
        numbers = ["".join(DIGITS[i] for i in drawn) for drawn in rng.integers(10, size=(size, self.digits))]
        marks = []
        for colour, row, number in zip(colours, rows, numbers, strict=True):
            # Digits stand in neighbouring cells of their row.
            room = CELLS - self.digits
            first = int(rng.integers(room + 1)) if self.scattered else room // 2
            marks += [Mark(digit, colour, row, first + i) for i, digit in enumerate(number)]
        image = picture(rng, marks)
        if self.asked == 1:
            return Example(f"value {colours[0][0]}", numbers[0], image)
        # Several: the form of `Recall`, with initials of colours as keys.
        form = "".join(f"{colour[0]}={'?' * self.digits};" for colour in colours[: self.asked])
        pairs = zip(colours[: self.asked], numbers, strict=False)
        return Example(form, "".join(f"{colour[0]}={number};" for colour, number in pairs), image)


@dataclasses.dataclass(frozen=True)
class CountShapes(ChecksumSplit):
    """`count c` is answered with how many crosses there are; the size is how many other shapes there are.

    Every count from 0 to `most` is as likely. A decoder needs all image tokens that show one.

    Attributes:
      most: largest count.
    """

    most: Annotated[int, Interval(ge=1, le=MOST_COUNTED)] = 6

    name = "count"

    def answer_length(self, size: int) -> int:
        """One digit."""
        return 1

    @property
    @override
    def _sizes(self) -> tuple[int, float, str]:
        return 0, CELLS**2 - self.most, "the cells that are left"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        asked = SHAPES[rng.integers(len(SHAPES))]
        others = [shape for shape in SHAPES if shape != asked]
        # The count is drawn first and then drawn that often: all counts are as likely.
        count = int(rng.integers(self.most + 1))
        shapes = [asked] * count + [others[i] for i in rng.integers(len(others), size=size)]
        return Example(f"count {asked[0]}", DIGITS[count], picture(rng, _scattered(rng, shapes)))


@dataclasses.dataclass(frozen=True)
class LocateShape(ChecksumSplit):
    """`where c` is answered with row and column of the one cross, counted from 1, as in `25`.

    The size is how many other shapes there are. A decoder needs one image token, and where it stands.
    """

    name = "locate"

    def answer_length(self, size: int) -> int:
        """Two digits."""
        return 2

    @property
    @override
    def _sizes(self) -> tuple[int, float, str]:
        return 0, CELLS**2 - 1, "the cells that are left"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        asked = SHAPES[rng.integers(len(SHAPES))]
        others = [shape for shape in SHAPES if shape != asked]
        # One of the kind asked for, so that its place is the answer.
        shapes = [asked, *(others[i] for i in rng.integers(len(others), size=size))]
        marks = _scattered(rng, shapes)
        answer = f"{marks[0].row + 1}{marks[0].column + 1}"
        return Example(f"where {asked[0]}", answer, picture(rng, marks))


def _scattered(rng: np.random.Generator, shapes: list[str]) -> list[Mark]:
    """The shapes in distinct cells, in random colours."""
    cells = rng.permutation(CELLS**2)[: len(shapes)].tolist()
    colours = rng.choice(list(COLOURS), len(shapes)).tolist()
    placed = zip(shapes, colours, cells, strict=True)
    return [Mark(shape, colour, *divmod(cell, CELLS)) for shape, colour, cell in placed]
