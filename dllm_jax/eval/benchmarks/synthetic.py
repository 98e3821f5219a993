"""The small tasks of `dllm_jax.tasks`, exactly scored, as requests; and their needle in a haystack."""

import itertools
from collections.abc import Sequence

import numpy as np

from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.tasks import Example, Recall, Task, asked_pair, examples, needle
from dllm_jax.tasks.base import WITH_IMAGES, exact_match

RECALLED = Recall().answer_length(1) + 1  # positions: the value and its end


def synthetic_requests(runner: Runner, task: Task, sizes: Sequence[int], count: int) -> list[EvalRequest]:
    """Held-out examples of a task, a group per size.

    Args:
      runner: the model with its settings, of which the seed is that of the examples.
      task: generates the examples.
      sizes: Sizes of the examples.
      count: examples of each size.

    Raises:
      ValueError: a size that the task does not have, no size, a count below 1, or a task with images.
    """
    if not sizes or count < 1:
        raise ValueError(f"sizes={tuple(sizes)} and count={count}: there is nothing to evaluate")
    # One length for all sizes, so that they share programs.
    length = runner.decoding.length or response(task, sizes)
    return [
        synthetic_request(runner, f"{i}", example, f"{task.name} {size}", length)
        for size in sizes
        for i, example in enumerate(examples(task, runner.decoding.seed, size, count, "held_out"))
    ]


def response(task: Task, sizes: Sequence[int]) -> int:
    """Response positions that the longest answer and its end need."""
    return max((task.answer_length(size) for size in sizes), default=0) + 1


def synthetic_request(
    runner: Runner, id: str, example: Example, group: str, length: int, cell: tuple[int, float] | None = None
) -> EvalRequest:
    """An example as a request, scored 1 where the answer is exactly right, else 0."""
    if example.image is not None:
        raise ValueError(f"examples of {group} have images, which are not supported here. {WITH_IMAGES}")
    ids = tuple(runner.lm.chat_ids(example.prompt))
    score = lambda answer: float(exact_match(answer, example))
    return EvalRequest(id, ids, length, group=group, references=(example.answer,), score=score, cell=cell)


def recall(
    runner: Runner, lengths: Sequence[int], depths: Sequence[float], repeats: int
) -> list[EvalRequest]:
    """Needle in a haystack as key-value recall, the task that the bundled models are trained on.

    A group per prompt length; arguments as in `grid`.
    """
    size, seed = runner.decoding.length or RECALLED, runner.decoding.seed
    return [
        synthetic_request(
            runner, f"{depth:g} % #{i % repeats}", example, f"{length} tokens", size, (length, depth)
        )
        for i, (length, depth, example) in enumerate(recall_grid(lengths, depths, repeats, seed))
    ]


def recall_grid(
    lengths: Sequence[int], depths: Sequence[float], repeats: int, seed: int
) -> list[tuple[int, float, Example]]:
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
        rng = np.random.default_rng([seed, length, round(depth * 1_000_000)])  # in every grid
        task, pairs = needle(length)
        wanted = round(depth / 100 * (pairs - 1))
        # Examples are drawn until one asks for the pair at the depth: none of them is made to measure.
        drawn = (task.example(rng, pairs, "held_out") for _ in itertools.count())
        matching = (example for example in drawn if asked_pair(example) == wanted)
        cells += [(length, depth, example) for example in itertools.islice(matching, repeats)]
    return cells
