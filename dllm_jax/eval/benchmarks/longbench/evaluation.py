"""Evaluates a model on LongBench."""

from collections.abc import Sequence
from pathlib import Path

from dllm_jax.eval.benchmarks.longbench.data import Sample, read
from dllm_jax.eval.benchmarks.longbench.prompts import Prompts
from dllm_jax.eval.benchmarks.longbench.tasks import TASKS, LongBenchTask
from dllm_jax.eval.results.record import scored
from dllm_jax.eval.results.schema import Row
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Request, Runner


def tasks_named(names: Sequence[str]) -> list[LongBenchTask]:
    """The tasks of these names, or all of them if there are none.

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
    chosen: Sequence[LongBenchTask],
    truncate_to: int | None = None,
    limit: int | None = None,
    length: int | None = None,
    journal: Journal | None = None,
) -> list[Row]:
    """Rows of a record, a group per task.

    Args:
      runner: the model with its settings.
      data: the folder with `<task>.jsonl`.
      prompts: the published templates.
      chosen: the tasks.
      truncate_to: longer prompts lose their middle, see `truncate`; in tokens. None: never.
      limit: only the first samples of each task.
      length: response positions of every task, instead of the published ones (LongLLaDA decodes 512).
      journal: of an earlier run, to resume from.

    Raises:
      FileNotFoundError: a data file is missing.
      ValueError: bad data, with file and line; or block or steps that do not fit a task's answers.
    """
    for task in chosen:
        _check_shape(runner, task, length or task.length)
    samples: list[tuple[LongBenchTask, Sample]] = [
        (task, sample) for task in chosen for sample in _checked(task, data)[:limit]
    ]
    requests = [
        Request(
            sample.id,
            tuple(prompts.ids(task, sample, runner.lm.tokenizer, truncate_to)),
            length or task.length,
            task.stop,
            task.name,
        )
        for task, sample in samples
    ]
    entries = runner.run(requests, journal)
    scores = [
        0.0 if entry["answer"] is None else task.score(entry["answer"], sample.answers, sample.classes)
        for (task, sample), entry in zip(samples, entries, strict=True)
    ]
    return scored(requests, entries, scores, [sample.answers for _, sample in samples])


def _check_shape(runner: Runner, task: LongBenchTask, length: int):
    try:
        runner.decoding.at(length)
    except ValueError as error:
        raise ValueError(f"{task.name}, answers of {length} positions: {error}") from None


def _checked(task: LongBenchTask, data: Path) -> list[Sample]:
    """The samples, checked before anything is decoded: each can be scored."""
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
