"""`python -m dllm_jax.eval longbench`."""

import dataclasses
from pathlib import Path

from dllm_jax.eval.benchmarks.longbench import FILE, Prompts
from dllm_jax.eval.benchmarks.longbench import evaluation as longbench
from dllm_jax.eval.cli.common import DEFAULTS, Common, Flat, evaluate


def run_longbench(
    data: Path,
    common: Flat = DEFAULTS,
    prompts: Path | None = None,
    tasks: tuple[str, ...] = (),
    truncate_to: int | None = None,
    limit: int | None = None,
    answer_length: int | None = None,
) -> int:
    """LongBench's English tasks, from a local copy of the data set.

    Answers have the task's length. --steps is the number of steps of each of them; --length L with --steps S
    means S steps for L positions instead, so that longer answers have more steps.

    Args:
      data: the folder with <task>.jsonl.
      common: model and decoding.
      prompts: LongBench's dataset2prompt.json; None: the one in the data folder.
      tasks: by name; none: all 16.
      truncate_to: longer prompts lose their middle; in tokens. The paper's max_length: 3500, 7500, 15500 or
        31500. None: never.
      limit: only the first samples of each task.
      answer_length: response positions of every task, instead of the published ones.
    """
    common = _shaped(common, answer_length)
    templates = Prompts.read(prompts or data / FILE)
    chosen = longbench.tasks(tasks)
    settings = {
        "tasks": [task.name for task in chosen],
        "prompts_sha256": templates.sha256,
        "truncate_to": truncate_to,
        "limit": limit,
        "answer_length": answer_length,
    }
    run = lambda runner, journal: longbench.evaluate(
        runner, data, templates, chosen, truncate_to, limit, answer_length, journal
    )
    return evaluate(common, "longbench", settings, run)


def _shaped(common: Common, answer_length: int | None) -> Common:
    """The options with the length that --steps is meant for, if there is one."""
    if common.length is None:
        return dataclasses.replace(common, length=answer_length)
    if answer_length is not None:
        raise ValueError(f"--length {common.length} and --answer-length {answer_length}: give one of them")
    if common.steps is None:
        raise ValueError(
            f"--length {common.length}: answers have the task's length; --answer-length {common.length} sets "
            "that of all tasks, and --length with --steps says how many steps so many positions take"
        )
    return common
