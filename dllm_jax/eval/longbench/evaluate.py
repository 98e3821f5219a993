"""A model on LongBench."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dllm_jax.eval.journal import Journal
from dllm_jax.eval.longbench.data import Sample, read
from dllm_jax.eval.longbench.prompts import Prompts
from dllm_jax.eval.longbench.tasks import TASKS, Task
from dllm_jax.eval.record import scored
from dllm_jax.eval.runner import Request, Runner


def tasks(names: Sequence[str]) -> list[Task]:
    """The tasks by name; all of them for no names.

    Raises:
      ValueError: an unknown name.
    """
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not among LongBench's English tasks: {', '.join(TASKS)}")
    return [TASKS[name] for name in names] or list(TASKS.values())


def evaluate(
    runner: Runner,
    data: Path,
    prompts: Prompts,
    chosen: Sequence[Task],
    max_length: int | None = None,
    limit: int | None = None,
    length: int | None = None,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """Rows of a record, a group per task.

    Args:
      runner: the model with its settings.
      data: the folder with `<task>.jsonl`.
      prompts: the published templates.
      chosen: the tasks.
      max_length: prompts longer than this many tokens lose their middle; published runs leave 500 to 1000
        tokens of the window free (3500, 7500, 15500, 31500).
      limit: only the first samples of each task.
      length: response positions of every task instead of the published one's (LongLLaDA decodes 512 always).
      journal: resumes from it.

    Raises:
      FileNotFoundError: a data file is missing.
      ValueError: bad data, with file and line.
    """
    asked: list[tuple[Task, Sample]] = [
        (task, sample) for task in chosen for sample in _checked(task, data)[:limit]
    ]
    requests = [
        Request(
            sample.id,
            tuple(prompts.ids(task, sample, runner.tokenizer, max_length)),
            length or task.length,
            task.stop,
            task.name,
        )
        for task, sample in asked
    ]
    entries = runner.run(requests, journal)
    scores = [
        0.0 if entry["answer"] is None else task.score(entry["answer"], sample.answers, sample.classes)
        for (task, sample), entry in zip(asked, entries, strict=True)
    ]
    return scored(requests, entries, scores, [{"references": list(sample.answers)} for _, sample in asked])


def _checked(task: Task, data: Path) -> list[Sample]:
    """The samples, of which each can be scored: found out before anything is decoded."""
    path = data / f"{task.name}.jsonl"
    samples = read(path)
    for sample in samples:
        where = f"{path}:{sample.line}: sample {sample.id!r}"
        if task.kind == "classification" and not sample.classes:
            raise ValueError(f"{where} lacks all_classes, which {task.name} needs")
        if task.kind == "retrieval":
            try:
                task.score("", sample.answers)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    return samples
