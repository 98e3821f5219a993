"""Questions with right answers: where they come from, how they are encoded and scored.

A question is an object with `prompt` (text of the user, messages of a conversation, or token ids, which get
no chat template) and `answer` (text), such as an `Example` of `dllm_jax.tasks` or one of your own.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.run.files import read_objects
from dllm_jax.options import shown
from dllm_jax.tasks import Example

RULE = 'must be pairs (prompt, answer), examples of dllm_jax.tasks, or have "prompt" and "answer"'
Score = Callable[[str, Any], float]


def exact_match(answer: str, question: Any) -> bool:
    """Whether an answer is the right one, surrounding white space aside."""
    return answer.strip() == question.answer


def as_questions(values: Iterable[Any]) -> tuple[Any, ...]:
    """The questions as objects with `prompt` and `answer`; a pair becomes an `Example`.

    Raises:
      ValueError: there are none, or something that is no question.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"questions={shown(values)} {RULE}")
    found = tuple(Example(*v) if isinstance(v, tuple | list) and len(v) == 2 else v for v in values)
    for one in found:
        if not hasattr(one, "prompt") or not isinstance(getattr(one, "answer", None), str):
            raise ValueError(f"questions hold {shown(one)}: they {RULE}, the answer being text")
    if not found:
        raise ValueError("questions are empty: there is nothing to tune on")
    return found


def read_jsonl(path: Path) -> list[Example]:
    """Reads questions, one JSON object {"prompt": ..., "answer": "..."} per line; empty lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is no such object, or bytes that are not UTF-8; names file and line.
    """
    found = []
    for number, value in read_objects(path):
        if "prompt" not in value or not isinstance(value.get("answer"), str):
            raise ValueError(f'{path}:{number}: no object with "prompt" and "answer", which is text')
        found.append(Example(value["prompt"], value["answer"]))
    return found


def prompt_ids(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    """The token ids of a question's prompt.

    Raises:
      ValueError: a prompt that is neither text nor messages nor token ids, or no chat template for it.
    """
    values: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(values, list | tuple) and values and isinstance(values[0], dict):
        return tuple(chat_ids(tokenizer, list(values)))
    try:
        if ids := tuple(map(int, values)):
            return ids
    except (TypeError, ValueError):
        pass
    raise ValueError(f"prompt={shown(prompt)} must be text, messages, or token ids")


def scored(score: Score, question: Any, answer: str) -> float:
    """The score of an answer.

    Raises:
      ValueError: the scorer returns something else than True, False or a number in [0, 1].
    """
    found: Any = score(answer, question)
    try:
        value = float(found)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"score gave {shown(found)} for the answer {shown(answer)}; it must lie in [0, 1]")
    return value
