"""Needle in a haystack as key-value recall, the task that the embedded models are trained on."""

import itertools
from collections.abc import Sequence

import numpy as np

from dllm_jax.eval.benchmarks.synthetic import exact_rows, request
from dllm_jax.eval.results.schema import GridRow
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Runner
from dllm_jax.tasks import Example, Recall, asked_pair, needle

RESPONSE = Recall().answer_length(1) + 1  # positions: the value and its end


def grid(
    lengths: Sequence[int], depths: Sequence[float | int], repeats: int, seed: int
) -> list[tuple[int, float | int, Example]]:
    """Held-out examples for each prompt length (tokens) and depth (percent; 0 asks for the first pair).

    Raises:
      ValueError: a length that is too short, a depth outside [0, 100], or an empty grid.
    """
    if not lengths or not depths or repeats < 1:
        raise ValueError(f"{lengths=}, {depths=} and {repeats=}: there is nothing to evaluate")
    if not all(0 <= depth <= 100 for depth in depths):
        raise ValueError(f"depths={tuple(depths)} must lie in [0, 100]")
    cells = []
    for length, depth in itertools.product(lengths, depths):
        rng = np.random.default_rng([seed, length, round(depth * 1_000_000)])  # whatever else is in the grid
        task, pairs = needle(length)
        wanted = round(depth / 100 * (pairs - 1))
        drawn = (task.example(rng, pairs, "held_out") for _ in itertools.count())
        matching = (example for example in drawn if asked_pair(example) == wanted)
        cells += [(length, depth, example) for example in itertools.islice(matching, repeats)]
    return cells


def evaluate(
    runner: Runner,
    lengths: Sequence[int],
    depths: Sequence[float | int],
    repeats: int = 10,
    seed: int = 0,
    journal: Journal | None = None,
) -> list[GridRow]:
    """Rows of a record, scored by exact match, a group per prompt length; arguments as in `grid`."""
    cells = grid(lengths, depths, repeats, seed)
    requests = [
        request(runner, f"{depth:g} % #{i % repeats}", example, f"{length} tokens", RESPONSE)
        for i, (length, depth, example) in enumerate(cells)
    ]
    rows = exact_rows(requests, runner.run(requests, journal), [example for *_, example in cells])
    return [
        {**row, "length": length, "depth": depth} for row, (length, depth, _) in zip(rows, cells, strict=True)
    ]
