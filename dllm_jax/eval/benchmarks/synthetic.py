"""The small tasks of `dllm_jax.tasks`, exactly scored, as requests."""

from collections.abc import Sequence

from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.results.record import scored
from dllm_jax.eval.results.schema import Entry, Row
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Request, Runner
from dllm_jax.tasks import Example, Task, exact, examples


def evaluate(
    runner: Runner,
    task: Task,
    sizes: Sequence[int],
    count: int,
    seed: int = 0,
    journal: Journal | None = None,
) -> list[Row]:
    """Rows of a record: held-out examples of a task, a group per size.

    Args:
      runner: the model with its settings.
      task: generates the examples.
      sizes: of the examples.
      count: examples of each size.
      seed: of the examples.
      journal: of an earlier run, to resume from.

    Raises:
      ValueError: a size that the task does not have, no size, or a count below 1.
    """
    if not sizes or count < 1:
        raise ValueError(f"sizes={tuple(sizes)} and count={count}: there is nothing to evaluate")
    drawn = {size: examples(task, seed, size, count, "held_out") for size in sizes}
    questions = [
        (f"{task.name} {size}", i, e) for size, chosen in drawn.items() for i, e in enumerate(chosen)
    ]
    needed = response(task, sizes)
    requests = [request(runner, f"{i}", example, group, needed) for group, i, example in questions]
    entries = runner.run(requests, journal)
    return exact_rows(requests, entries, [example for _, _, example in questions])


def response(task: Task, sizes: Sequence[int]) -> int:
    """Response positions that the longest answer and its end need."""
    return max((task.answer_length(size) for size in sizes), default=0) + 1


def request(runner: Runner, id: str, example: Example, group: str, needed: int) -> Request:
    """An example as a request for an answer of the runner's `length`, or else of `needed` positions."""
    ids = chat_ids(runner.lm.tokenizer, [{"role": "user", "content": example.prompt}])
    return Request(id, tuple(ids), runner.decoding.length or needed, group=group)


def exact_rows(requests: Sequence[Request], entries: Sequence[Entry], wanted: Sequence[Example]) -> list[Row]:
    """Rows scored 1 where the answer is exactly right, else 0."""
    right = exact([entry["answer"] or "" for entry in entries], list(wanted))
    return scored(requests, entries, [float(r) for r in right], [[example.answer] for example in wanted])
