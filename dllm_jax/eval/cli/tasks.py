"""`python -m dllm_jax.eval tasks`."""

from dllm_jax import tasks as task_module
from dllm_jax.eval.benchmarks import synthetic as tasks
from dllm_jax.eval.cli.common import DEFAULTS, Flat, evaluate, parsed
from dllm_jax.published import expressions
from dllm_jax.tasks import Task


def run_tasks(
    common: Flat = DEFAULTS,
    task: str = "FewShot",
    sizes: tuple[int, ...] = (5,),
    count: int = 32,
) -> int:
    """Exact match on held-out examples of a task of `dllm_jax.tasks`.

    Without --length, responses are as long as the longest answer and its end need.

    Args:
      common: model and decoding.
      task: the task, as a constructor call.
      sizes: of its examples: examples of each kind (FewShot), steps (Chain), pairs (Recall).
      count: examples of each size.
    """
    chosen = parsed(lambda text: expressions.construct(text, task_module, Task), task)
    settings = {"task": repr(chosen), "sizes": list(sizes), "count": count}
    run = lambda runner, journal: tasks.evaluate(runner, chosen, sizes, count, common.seed, journal)
    common = common.with_length(tasks.response(chosen, sizes))
    return evaluate(common, "tasks", settings, run)
