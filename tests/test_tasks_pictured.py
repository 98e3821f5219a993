"""Questions about pictures: a reader of pixels, written apart from the drawing, finds the same answers."""

import itertools
import re

import numpy as np
import pytest

from dllm_jax.tasks import CountShapes, Example, LocateShape, ReadNumbers, Task, examples
from dllm_jax.tasks.drawing import CELL, CELLS, COLOURS, GLYPHS

TASKS = {
    "read": (ReadNumbers(), (1, 5)),
    "read-scattered": (ReadNumbers(colours=2, digits=2, scattered=True), (2,)),
    "read-several": (ReadNumbers(asked=3), (3, 5)),
    "count": (CountShapes(), (0, 6)),
    "locate": (LocateShape(), (0, 8)),
}


def marks(image: np.ndarray) -> list[tuple[str, str, int, int]]:
    """Glyph, initial of the colour, row and column of everything that is drawn, row by row."""
    lit, found = image.max(axis=2) > 140, []
    for row, column in np.ndindex(CELLS, CELLS):
        cell = (slice(row * CELL, (row + 1) * CELL), slice(column * CELL, (column + 1) * CELL))
        rows, columns = np.nonzero(lit[cell])
        if not len(rows):
            continue
        shape = lit[cell][rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        (glyph,) = [name for name, dots in GLYPHS.items() if np.array_equal(_trimmed(dots), shape)]
        mean = image[cell][lit[cell]].mean(axis=0)
        distance = {name[0]: np.abs(mean - colour).sum() for name, colour in COLOURS.items()}
        found.append((glyph, min(distance, key=distance.__getitem__), row, column))
    return found


def _trimmed(dots: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(dots)
    return dots[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def solve(example: Example) -> str:
    seen = marks(example.image)
    numbers = {}
    for glyph, colour, *_ in seen:
        numbers[colour] = numbers.get(colour, "") + glyph
    if asked := re.findall(r"(\w)=\?", example.prompt):
        return "".join(f"{colour}={numbers[colour]};" for colour in asked)
    kind, initial = example.prompt.split()
    if kind == "value":
        return numbers[initial]
    shapes = [(row, column) for glyph, _, row, column in seen if glyph[0] == initial]
    if kind == "count":
        return str(len(shapes))
    ((row, column),) = shapes
    return f"{row + 1}{column + 1}"


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_what_the_picture_shows_and_a_function_of_the_seed(name):
    task, sizes = TASKS[name]
    assert isinstance(task, Task)
    for size, split in itertools.product(sizes, ("train", "held_out")):
        for example in examples(task, 7, size, 12, split):
            assert example.answer == solve(example)
            assert len(example.answer) == task.answer_length(size)
            assert task.split_of(example) == split
    one, same, other = (examples(task, seed, sizes[-1], 1, "train")[0] for seed in (3, 3, 4))
    assert np.array_equal(one.image, same.image)
    assert one[:2] == same[:2]
    assert not np.array_equal(one.image, other.image)


def test_the_picture_decides_which_half_a_question_is_in():
    task = CountShapes()
    drawn = [example for split in ("train", "held_out") for example in examples(task, 5, 6, 20, split)]
    prompts = {task.split_of(example): set() for example in drawn}
    for example in drawn:
        prompts[task.split_of(example)].add(example.prompt)
    assert prompts["train"] & prompts["held_out"]  # the same words, so they cannot be what decides


def test_tasks_and_sizes_that_there_are_not_are_refused():
    for task, size, message in (
        (ReadNumbers(asked=3), 2, r"size=2 must lie in \[3, 5\]"),
        (ReadNumbers(colours=4), 5, r"size=5 must lie in \[1, 4\]"),
        (CountShapes(most=4), 61, r"size=61 must lie in \[0, 60\]"),
        (LocateShape(), 64, r"size=64 must lie in \[0, 63\]"),
    ):
        with pytest.raises(ValueError, match=message):
            examples(task, 0, size, 1, "train")
    with pytest.raises(ValueError, match="colours=6"):
        ReadNumbers(colours=6)
