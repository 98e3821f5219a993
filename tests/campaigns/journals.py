"""Journals of prompts that occur several times, in runs that fail, are killed, and begin while another runs.

What a run is asked must be exactly what has no answer on the disk, and in the end every prompt has its own
answer. A line that is damaged before the last one is refused by file and number, and nothing is written.
"""

import contextlib
import functools
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dllm_jax.eval.run.journal import Journal
from tests.campaigns.verdicts import Case, Outcome, Verdict, judge

NAME = "journals"
SAMPLE = 200
WORDS = (
    "T=211;", "T=211;", "", " ", "a\nb", "a\r\nb", "line\u2028separator", "\ufeffmark", "ü", "漢字", "😀",
    "\ud83d", "\udce9x", "\0", '"}', "#1", "x" * 5000, "<|eot_id|>", 7, 7.0, True, None, [1, 2], [],
    {"prompt": [3], "id": "a"}, {"id": "a", "prompt": [3]},
)  # fmt: skip
SETTINGS = (None, "a", {"model": "m", "length": 4}, {"length": 4, "model": "m"}, {"model": "m", "length": 5})
TAILS = (
    b"",
    b'{"key": "half',
    b"\0" * 40,
    b"\xff\xfe",
    b"[" * 3,
)  # of a kill, after the last line


def cases(seed: int) -> Iterator[Case]:
    """Endless; case n of a seed is the same in every run."""
    for number in itertools.count():
        rng = random.Random(f"{seed}:{number}")
        items = rng.choices(rng.sample(WORDS, rng.randint(1, 6)), k=rng.randint(0, 9))
        settings = rng.choices(SETTINGS, k=2)
        shown = f"seed {seed}, case {number}: {items!r:.200} with {settings}"
        yield Case(shown, functools.partial(tried, rng, items, settings))


def tried(rng: random.Random, items: list[Any], settings: list[Any]) -> Verdict:
    """Some runs with kills, then one to the end; and a damaged line."""
    with tempfile.TemporaryDirectory() as place:
        path, truth = Path(place) / "journal.jsonl", Truth(items)
        for run in range(rng.randint(1, 5)):
            if fault := one_run(rng, path, truth, settings[run % 2], whole=False):
                return Verdict(Outcome.WRONG, f"run {run}: {fault}")
        for last in settings:
            if fault := one_run(rng, path, truth, last, whole=True):
                return Verdict(Outcome.WRONG, f"the last run: {fault}")
            found = Journal(path).found(items, last)
            if [entry and entry["answer"] for entry in found] != [right(last, i) for i in range(len(items))]:
                return Verdict(Outcome.WRONG, f"the end with {last} has other answers: {found!r:.300}")
        return damaged(rng, path)


class Truth:
    """What is on the disk: lines with their ends in bytes, and whether each is an answer."""

    def __init__(self, items: list[Any]):
        self.items = items
        self.lines: list[tuple[int, Any, int, bool]] = []  # end, settings, number of the item, answered

    def cut(self, size: int):
        self.lines = [line for line in self.lines if line[0] <= size]

    def left(self, settings: Any) -> list[int]:
        last = {number: done for _, of, number, done in self.lines if of == settings}
        return [number for number in range(len(self.items)) if not last.get(number)]


def right(settings: Any, number: int) -> str:
    return f"{json.dumps(settings, sort_keys=True)} {number} ü\ud83d\n"


def one_run(rng: random.Random, path: Path, truth: Truth, settings: Any, whole: bool) -> str:
    """A run that answers some of what is left, or all of it; "", or what is wrong."""
    journal = Journal(path)
    left, wanted = journal.left(truth.items, settings), truth.left(settings)
    if [asked.number for asked in left] != wanted or any(a.item != truth.items[a.number] for a in left):
        return f"asked {[asked.number for asked in left]}, of which {wanted} have no answer"
    if left and rng.random() < 0.3:
        with contextlib.suppress(ValueError):
            Journal(path).left(truth.items, settings)
            return "a second writer is let in"
    rng.shuffle(left)
    for asked in left if whole else left[: rng.randint(0, len(left))]:
        done = whole or rng.random() < 0.7
        if done:
            journal.answer(asked, right(settings, asked.number), forwards=3)
        else:
            journal.fail(asked, ValueError("no \ud83d answer"))
        truth.lines.append((path.stat().st_size, settings, asked.number, done))
    journal.close()
    if path.exists() and not whole and rng.random() < 0.7:  # killed while the last lines were written
        size = path.stat().st_size
        size -= min(size, rng.choice((0, 1, 2, 40, 200, 6000)))
        # Where no line is finished, the rest is the beginning of a journal, or zeros.
        content, tail = path.read_bytes()[:size], rng.choice(TAILS)
        path.write_bytes(content + (tail if b"\n" in content or not tail.strip(b"\0") else b""))
        truth.cut(size)
    return ""


def damaged(rng: random.Random, path: Path) -> Verdict:
    """A finished line that is no entry is named, and the file stays as it is."""
    if not path.exists():  # no prompts
        return Verdict(Outcome.RIGHT)
    lines = path.read_bytes().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = lines[at][: rng.randrange(len(lines[at]) - 2)] + b"\n"
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    place = str(path) if at == 0 else f"{path}:{at + 1}"
    verdict = judge(lambda: Journal(path).left(["new"]), [place], valid=False)
    return verdict if path.read_bytes() == before else Verdict(Outcome.WRONG, "it was written to")
