"""`python -m dllm_jax.eval longbench`."""

from pathlib import Path

from dllm_jax.eval.cli.common import DEFAULTS, Flat, evaluate
from dllm_jax.eval.longbench import FILE, Prompts
from dllm_jax.eval.longbench import evaluate as longbench


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
