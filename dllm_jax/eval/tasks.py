"""The small tasks of `dllm_jax.tasks`, exactly scored, as requests."""

from collections.abc import Sequence
from typing import Any

from dllm_jax.chat import encode_chats
from dllm_jax.eval.journal import Entry, Journal
from dllm_jax.eval.record import scored
from dllm_jax.eval.runner import Request, Runner
from dllm_jax.tasks import Example, Task, exact, examples


def chat_ids(tokenizer: Any, text: str, pad_id: int) -> tuple[int, ...]:
    """Token ids of a user's message under the checkpoint's chat template."""
    ids, _ = encode_chats(tokenizer, [[{"role": "user", "content": text}]], pad_id)
    return tuple(int(i) for i in ids[0])


def evaluate(
    runner: Runner,
    task: Task,
    sizes: Sequence[int],
    count: int,
    seed: int = 0,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """Rows of a record: held-out examples of a task, a group per size.

    Args:
      runner: the model with its settings.
      task: where examples come from.
      sizes: their sizes.
      count: examples of each size.
      seed: of the examples.
      journal: resumes from it.

    Raises:
      ValueError: a size the task does not have, or no size at all.
    """
    if not sizes or count < 1:
        raise ValueError(f"sizes={tuple(sizes)} and count={count}: there is nothing to evaluate")
    drawn = {size: examples(task, seed, size, count, "held_out") for size in sizes}
    asked = [(f"{task.name} {size}", i, e) for size, chosen in drawn.items() for i, e in enumerate(chosen)]
    requests = [request(runner, f"{i}", example, group) for group, i, example in asked]
    entries = runner.run(requests, journal)
    return exact_rows(requests, entries, [example for _, _, example in asked])


def request(runner: Runner, id: str, example: Example, group: str) -> Request:
    """An example as a request of the runner's own length."""
    ids = chat_ids(runner.tokenizer, example.prompt, runner.model.spec.eos_id)
    return Request(id, ids, runner.decoding.length, group=group)


def exact_rows(
    requests: Sequence[Request], entries: Sequence[Entry], wanted: Sequence[Example]
) -> list[dict[str, Any]]:
    """Rows scored 1 where the answer is exactly right."""
    right = exact([entry["answer"] or "" for entry in entries], list(wanted))
    return scored(requests, entries, [float(r) for r in right], [{"references": [e.answer]} for e in wanted])
