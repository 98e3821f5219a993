"""`python -m dllm_jax.eval tasks`."""

from dllm_jax import expressions
from dllm_jax import tasks as task_module
from dllm_jax.eval import tasks
from dllm_jax.eval.cli.common import DEFAULTS, Flat, evaluate
from dllm_jax.tasks import Task


def run_tasks(
    common: Flat = DEFAULTS,
    task: str = "Recall",
    sizes: tuple[int, ...] = (2, 4, 8),
    count: int = 32,
) -> int:
    """Exact match on held-out examples of a task of `dllm_jax.tasks`.

    Without --length, responses are as long as the longest answer and its end need.

    Args:
      common: model and decoding.
      task: the task, as a constructor call.
      sizes: of its examples.
      count: examples of each size.
    """
    chosen = expressions.construct(task, task_module, Task)
    settings = {"task": repr(chosen), "sizes": list(sizes), "count": count}
    run = lambda runner, journal: tasks.evaluate(runner, chosen, sizes, count, common.seed, journal)
    common = common.with_length(tasks.response(chosen, sizes))
    return evaluate(common, "tasks", settings, run)
