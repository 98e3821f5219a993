"""Tasks in text and about pictures: solved by rules of their own, in halves that cannot meet."""

import collections
import re

import numpy as np
import pytest

from dllm_jax.eval.tuning.search import exact_match
from dllm_jax.tasks import (
    Chain,
    Example,
    FewShot,
    ReadNumbers,
    Recall,
    Sorting,
    Task,
    asked_pair,
    exact,
    examples,
    needle,
)
from dllm_jax.tasks.pictured import CELL, CELLS, COLORS, GLYPHS
from dllm_jax.tasks.text import SHORTEST

TASKS = {
    "recall": (Recall(), (1, 2, 14, 40)),
    "recall-1-digit": (Recall(alphabet=14, digits=1, hold_out=3), (2, 5)),
    "recall-filler": (Recall(filler=30), (2, 8)), "recall-several": (Recall(filler=20, asked=3), (3, 9)),
    "chain": (Chain(), (1, 7, 16)), "chain-among-values": (Chain(letters=8, values=12), (1, 7)),
    "sorting": (Sorting(), (2, 16, 40)), "chain-short": (Chain(letters=8), (7,)),
    "few-shot": (FewShot(), (3, 5)), "few-shot-clean": (FewShot(kinds=9, wrong=0), (1, 4)),
    "read": (ReadNumbers(), (1, 5)),
    "read-scattered": (ReadNumbers(colors=2, digits=2, scattered=True), (2,)),
}  # fmt: skip


def numbers(image: np.ndarray) -> dict[str, str]:
    """The digits that a picture shows in each color, by its initial, row by row."""
    lit, found = image.max(axis=2) > 140, collections.defaultdict(str)
    trimmed = lambda dots: dots[np.ix_(dots.any(axis=1), dots.any(axis=0))]
    for row, column in np.ndindex(CELLS, CELLS):
        cell = (slice(row * CELL, (row + 1) * CELL), slice(column * CELL, (column + 1) * CELL))
        if lit[cell].any():
            shape, mean = trimmed(lit[cell]), image[cell][lit[cell]].mean(axis=0)
            (digit,) = [digit for digit, dots in GLYPHS.items() if np.array_equal(trimmed(dots), shape)]
            distance = {name[0]: np.abs(mean - color).sum() for name, color in COLORS.items()}
            found[min(distance, key=distance.__getitem__)] += digit
    return found


def solve(task: Task, example: Example, size: int) -> str:
    """The answer by rules of its own, from text and picture alone."""
    prompt = example.prompt
    if isinstance(task, ReadNumbers):
        return numbers(example.image)[prompt.removeprefix("value ")]
    if isinstance(task, Sorting):
        return "".join(sorted(prompt.removesuffix(">"), key=lambda letter: letter.swapcase()))
    *items, question = prompt.split(";")
    if isinstance(task, Recall):
        pairs = dict(re.findall(r"([^aeiou])=(\d+)", prompt))
        if asked := re.findall(r"([^aeiou])=\?", prompt):
            return "".join(f"{key}={pairs[key]};" for key in asked)
        return pairs[re.sub("[aeiou]", "", question).removesuffix("=")]
    if isinstance(task, Chain):
        pairs, letter, walk = dict(item.split(">") for item in items if ">" in item), question[0], ""
        for _ in range(size):
            walk += f"{letter}>{pairs[letter]};"
            letter = pairs[letter]
        return walk
    votes = collections.Counter(item[-1] for item in items if item[0] == question[0])
    return votes.most_common(1)[0][0]


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right_in_their_half_and_a_function_of_the_seed(name):
    task, sizes = TASKS[name]
    with pytest.raises(ValueError, match="split='foo' must be"):
        examples(task, 1, sizes[0], 1, "foo")
    assert isinstance(task, Task)
    assert len({task, type(task)()}) == 1 + (task != type(task)())
    for size in sizes:
        for split in ("train", "held_out"):
            drawn = examples(task, 1, size, 30, split)
            for example in drawn:
                assert solve(task, example, size) == example.answer
                assert len(example.answer) == task.answer_length(size)
                assert task.split_of(example) == split
            assert len({len(example.prompt) for example in drawn}) == 1  # the size fixes the length
    plain = lambda e: (e.prompt, e.answer, e.image if e.image is None else e.image.tobytes())
    draw = lambda seed: list(map(plain, examples(task, seed, sizes[-1], 5, "train")))
    assert draw(7) == draw(7) != draw(8)
    assert draw((7, 1)) == draw((7, 1)) != draw((7, 2))


def test_filler_stands_anywhere_but_inside_pairs():
    drawn = examples(Recall(filler=12), 0, 3, 60, "train")
    assert all(len(re.findall("[aeiou]", e.prompt)) == 12 for e in drawn)
    gaps = np.array([[len(gap) for gap in re.split(r"\w=\d*;?", e.prompt)[:-1]] for e in drawn])
    assert gaps.shape == (60, 4)
    assert (gaps.max(0) > 4).all()  # before, between and after
    assert (gaps.min(0) < 2).all()


@pytest.mark.parametrize(
    ("tokens", "asked", "pairs"),
    [(SHORTEST, 1, 5), (64, 1, 8), (512, 1, 40), (2048, 1, 40), (42, 2, 2), (64, 4, 4), (1024, 8, 40)],
)
def test_a_needle_has_the_length_asked_for(tokens, asked, pairs):
    task, size = needle(tokens, asked)
    (example,) = examples(task, 0, size, 1, "held_out")
    assert (size, len(example.prompt) + 10) == (pairs, tokens)
    assert len(example.answer) == (3 if asked == 1 else 6 * asked)
    with pytest.raises(ValueError, match=f"tokens=41 must be at least {max(42, 16 * asked)}"):
        needle(41, asked)


def test_each_task_is_drawn_as_its_settings_say():
    """Keys are distinct, chains a ring, wrong examples outvoted; the asked pair is found among filler."""
    for example in examples(Recall(alphabet=6), 0, 6, 30, "train"):
        assert sorted(re.findall(r"(\w)=\d", example.prompt)) == sorted("bcdfgh")
    for example in examples(Chain(letters=9), 0, 9, 20, "train"):
        assert len(set(example.answer)) == 9 + len(">;")
        assert example.answer[-2] == example.answer[0] == example.prompt[-2]  # back where it began
    for example in examples(FewShot(kinds=3, wrong=2), 0, 5, 30, "train"):
        *items, question = example.prompt.split(";")
        votes = [item[-1] for item in items if item[0] == question[0]]
        assert (len(items), len(votes), votes.count(example.answer)) == (15, 5, 3)
    for filler in (0, 40):
        for example in examples(Recall(filler=filler), 5, 9, 40, "train"):
            values = re.findall(r"=(\d+);", example.prompt)
            assert values[asked_pair(example)] == example.answer


def test_exact_ignores_white_space_around_an_answer_only():
    wanted = [Example("", "ab"), *[Example("", "ab\n")] * 2]
    assert exact(["ab ", "a b", "ab"], wanted) == [True, False, True]
    assert [exact_match(" ab", each) for each in wanted] == [True, True, True]
    with pytest.raises(ValueError, match="1 answers for 3 examples"):
        exact(["ab"], wanted)


def test_sizes_that_there_are_not_are_refused():
    for task, size, message in (
        (Recall(), 0, r"size=0 must lie in \[1, 40\]"),
        (Recall(alphabet=4), 5, r"size=5 must lie in \[1, 4\]"),
        (Recall(asked=3), 2, r"size=2 must lie in \[3, 40\], from what is asked for to the number of keys"),
        (Sorting(), 1, r"size=1 must lie in \[2, 40\]"),
        (Chain(), 17, r"size=17 must lie in \[1, 16\]"),
        (FewShot(wrong=2), 4, r"size=4 must lie in \[5, inf\], above twice wrong=2"),
        (ReadNumbers(colors=4), 5, r"size=5 must lie in \[1, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            task.example(np.random.default_rng(0), size, "train")
    with pytest.raises(ValueError, match="colors=6"):
        ReadNumbers(colors=6)
    with pytest.raises(ValueError, match="asked=50 must be at most 40"):
        needle(800, 50)
