"""Needle in a haystack over key-value recall, which the embedded models solve."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dllm_jax.eval.journal import Journal
from dllm_jax.eval.runner import Runner
from dllm_jax.eval.tasks import exact_rows, request
from dllm_jax.tasks import Example, Recall


def asked_pair(example: Example) -> int:
    """Which pair of a recall prompt, `b=w;t=m;t=`, is asked for."""
    *pairs, asked = example.prompt.split(";")
    return [pair.split("=")[0] for pair in pairs].index(asked.split("=")[0])


def grid(
    task: Recall, sizes: Sequence[int], depths: Sequence[float | int], repeats: int, seed: int
) -> list[tuple[int, float | int, Example]]:
    """Held-out examples, `repeats` for each number of pairs and depth in percent (0 is the first pair).

    Raises:
      ValueError: a depth outside [0, 100], or nothing to draw.
    """
    if not sizes or not depths or repeats < 1:
        raise ValueError(f"{sizes=}, {depths=} and {repeats=}: there is nothing to evaluate")
    if not all(0 <= depth <= 100 for depth in depths):
        raise ValueError(f"depths={tuple(depths)} must lie in [0, 100]")
    cells = []
    for size, (i, depth) in itertools.product(sizes, enumerate(depths)):
        rng = np.random.default_rng([seed, size, i])
        wanted = round(depth / 100 * (size - 1))
        drawn = (task.example(rng, size, "held_out") for _ in itertools.count())
        matching = (example for example in drawn if asked_pair(example) == wanted)
        cells += [(size, depth, example) for example in itertools.islice(matching, repeats)]
    return cells


def evaluate(
    runner: Runner,
    task: Recall,
    sizes: Sequence[int],
    depths: Sequence[float | int],
    repeats: int = 10,
    seed: int = 0,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """Rows of a record, exactly scored, a group per number of pairs; arguments as in `grid`."""
    cells = grid(task, sizes, depths, repeats, seed)
    requests = [
        request(runner, f"{depth:g} % #{i % repeats}", example, f"{size} pairs")
        for i, (size, depth, example) in enumerate(cells)
    ]
    rows = exact_rows(requests, runner.run(requests, journal), [example for *_, example in cells])
    return [
        {**row, "length": size, "depth": depth} for row, (size, depth, _) in zip(rows, cells, strict=True)
    ]
