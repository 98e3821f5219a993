"""Questions of one's own: from a file, or as a caller has them, and their token ids."""

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.run.files import read_objects
from dllm_jax.options import shown
from dllm_jax.options.hints import NOTHING
from dllm_jax.state.text import check_text
from dllm_jax.tasks import Example
from dllm_jax.tasks.base import WITH_IMAGES

RULE = 'must be pairs (prompt, answer), examples of dllm_jax.tasks, or objects with "prompt" and "answer"'


def read_jsonl(path: Path | str) -> list[Example]:
    """Reads questions, one JSON object {"prompt": ..., "answer": "..."} per line; empty lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is no such object, bytes that are not UTF-8, or a text with half of a character;
        names file and line.
    """
    questions = []
    for where, value in read_objects(Path(path)):
        if "prompt" not in value or not isinstance(value.get("answer"), str):
            raise ValueError(f'{where}: no object with "prompt" and "answer", which is text')
        questions.append(Example(value["prompt"], value["answer"]))
    return questions


def as_questions(values: Iterable[Any]) -> tuple[Any, ...]:
    """The questions as objects with `prompt` and `answer`; a pair, or a dict of both, becomes an `Example`.

    Raises:
      ValueError: there are none, or something that is no question of text.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable) or not (given := tuple(values)):
        raise ValueError(f"questions={shown(values)} {RULE}, one or more")
    examples = tuple(map(_question, given))
    for i, example in enumerate(examples):
        answer = getattr(example, "answer", None)
        if not hasattr(example, "prompt") or not isinstance(answer, str):
            raise ValueError(f"questions hold {shown(example)}: they {RULE}, the answer being text")
        check_text(f"questions[{i}].answer={shown(answer)}", answer)
        if getattr(example, "image", None) is not None:
            raise ValueError(f"questions[{i}] has an image, which is not supported here. {WITH_IMAGES}")
    return examples


def _question(value: Any) -> Any:
    if isinstance(value, Mapping) and {"prompt", "answer"} <= value.keys():
        return Example(value["prompt"], value["answer"])
    return Example(*value) if isinstance(value, tuple | list) and len(value) == 2 else value


def question_ids(
    tokenizer: Any, prompt: Any, template: Mapping[str, Any] = NOTHING, name: str = "prompt"
) -> tuple[int, ...]:
    """The token ids of a prompt: text of the user, messages, or token ids, which get no chat template.

    Raises:
      ValueError: a prompt that is neither text nor messages nor token ids, a text with half of a character,
        or no chat template for it.
    """
    if isinstance(prompt, str):
        check_text(f"{name}={shown(prompt)}", prompt)
    given: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        messages = isinstance(given[0], dict)
        return tuple(chat_ids(tokenizer, given, template, name) if messages else map(operator.index, given))
    except (TypeError, LookupError):
        raise ValueError(f"{name}={shown(prompt)} must be text, messages, or token ids") from None
