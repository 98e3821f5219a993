"""Questions with right answers: where they come from, how they are encoded and scored."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dllm_jax.decoding.chat import chat_ids
from dllm_jax.eval.run.files import read_json_lines
from dllm_jax.eval.run.settings import rounded_up
from dllm_jax.options import shown
from dllm_jax.tasks import Example

RULE = 'must be pairs (prompt, answer), examples of dllm_jax.tasks, or have "prompt" and "answer"'


@runtime_checkable
class Question(Protocol):
    """A prompt and its right answer, such as an `Example` of `dllm_jax.tasks` or an object of your own."""

    @property
    def prompt(self) -> Any:
        """Text of the user, messages of a conversation, or token ids, which get no chat template."""
        ...

    @property
    def answer(self) -> str:
        """The right answer."""
        ...


Score = Callable[[str, Any], float]


def exact_match(answer: str, question: Question) -> bool:
    """Whether an answer is the right one, surrounding white space aside."""
    return answer.strip() == question.answer


def as_questions(values: Iterable[Any]) -> tuple[Question, ...]:
    """The questions as objects with `prompt` and `answer`.

    Raises:
      ValueError: there are none, or something that is no question.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"questions={shown(values)} {RULE}")
    found = tuple(map(_as_question, values))
    if not found:
        raise ValueError("questions are empty: there is nothing to tune on")
    return found


def _as_question(value: Any) -> Question:
    pair = isinstance(value, tuple | list) and len(value) == 2
    question: Any = Example(*value) if pair else value
    if not isinstance(question, Question) or not isinstance(question.answer, str):
        raise ValueError(f"questions hold {shown(value)}: they {RULE}, the answer being text")
    return question


def read_jsonl(path: Path) -> list[Example]:
    """Reads questions, one JSON object {"prompt": ..., "answer": "..."} per line; empty lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is no such object, or bytes that are not UTF-8; names file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    found = []
    for number, value in read_json_lines(path):
        if not isinstance(value, dict) or "prompt" not in value or not isinstance(value.get("answer"), str):
            raise ValueError(f'{path}:{number}: no object with "prompt" and "answer", which is text')
        found.append(Example(value["prompt"], value["answer"]))
    return found


def prompt_ids(tokenizer: Any, question: Question) -> tuple[int, ...]:
    """The token ids of a question's prompt.

    Raises:
      ValueError: a prompt that is neither text nor messages nor token ids, or no chat template for it.
    """
    prompt = question.prompt
    if isinstance(prompt, str):
        return tuple(chat_ids(tokenizer, [{"role": "user", "content": prompt}]))
    if not isinstance(prompt, Iterable) or not (values := list(prompt)):
        raise ValueError(f"prompt={shown(prompt)} must be text, messages, or token ids")
    if isinstance(values[0], dict):
        return tuple(chat_ids(tokenizer, values))
    try:
        return tuple(map(int, values))
    except (TypeError, ValueError):
        raise ValueError(f"prompt={shown(prompt)} must be text, messages, or token ids") from None


def response_length(tokenizer: Any, questions: Sequence[Question], multiple: int) -> int:
    """Response positions that the longest right answer and its end need, rounded up to a multiple."""
    lengths = [len(tokenizer(q.answer, add_special_tokens=False)["input_ids"]) for q in questions]
    return rounded_up(max(lengths) + 1, multiple)


def scored(score: Score, answer: str | None, question: Question) -> float:
    """The score of an answer; 0 if the request failed.

    Raises:
      ValueError: the scorer returns something else than True, False or a number in [0, 1].
    """
    if answer is None:
        return 0.0
    found = score(answer, question)
    try:
        value = float(found)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"score gave {shown(found)} for the answer {shown(answer)}; it must lie in [0, 1]")
    return value
