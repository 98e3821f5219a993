"""`dllm-jax generate`: answers a file of prompts; answers are appended to another file."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import tyro

import dllm_jax as dj
from dllm_jax import expressions
from dllm_jax.commands.options import DecodingArguments
from dllm_jax.decoding.chat import Message, chat_ids
from dllm_jax.decoding.stream import progress_bar
from dllm_jax.eval.run.files import read_objects, read_text
from dllm_jax.eval.run.journal import JournalRequest
from dllm_jax.eval.run.settings import LanguageModel
from dllm_jax.options import PositiveInt, shown
from dllm_jax.policies import Policy
from dllm_jax.samplers import Sampler

JSON_LINES = (".jsonl", ".ndjson", ".json")
RULE = 'must have "prompt", a text, or "messages", a conversation that ends with a message of the user'


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArguments(DecodingArguments):
    """Options of `dllm-jax generate`, besides those that it shares with `chat`."""

    questions: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTIONS")]
    """Text file with a prompt on each line; or a .jsonl file of objects with "prompt" or "messages"."""
    answers: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ANSWERS")]
    """JSON Lines file of the answers (.jsonl)."""
    slots: PositiveInt = 8
    """Number of sequences that decode together."""

    def __post_init__(self):
        super().__post_init__()
        # A model's name in this place would be the name of a new file.
        if self.answers.suffix.lower() not in JSON_LINES and not self.answers.is_file():
            raise ValueError(
                f"ANSWERS={str(self.answers)!r} must be a file such as answers.jsonl. A model is an option: "
                f"--model {self.answers}"
            )


class Question(NamedTuple):
    """A line of a file of prompts.

    Attributes:
      line: its number, from 1.
      said: A text, or the messages of a conversation.
    """

    line: int
    said: str | list[Message]

    def messages(self, system: str | None) -> list[Message]:
        """The conversation, after the system message if there is one, unless it begins with its own."""
        talk = [{"role": "user", "content": self.said}] if isinstance(self.said, str) else self.said
        begins = bool(talk) and isinstance(talk[0], dict) and talk[0].get("role") == "system"
        return talk if system is None or begins else [{"role": "system", "content": system}, *talk]


def main(asked: Annotated[GenerateArguments, tyro.conf.arg(name="")]) -> int:
    """Answers a file of prompts by continuous batching.

    Each answer is a line of JSON in the second file, with the number of its line and the settings. Run the
    same command again to continue: answered prompts are passed over, failed ones are asked again. An answer
    counts for its settings, and for the content of checkpoint, adapter and tokenizer.
    """
    try:
        return 1 if answer(asked) else 0
    except KeyboardInterrupt:
        again = f"interrupted: {asked.answers} holds the answers so far. Run the same command again to go on"
        raise KeyboardInterrupt(again) from None


def answer(asked: GenerateArguments) -> int:
    """Appends answers and failures to the journal; returns the number of failures."""
    asked.given()  # refused before anything is read
    if not (questions := list(read_questions(asked.questions))):
        raise ValueError(f"{asked.questions} holds no prompts")
    lm = asked.open()
    options, failures = asked.options(lm), dict[int, Exception]()
    settings = settings_of(asked, lm, options)
    with dj.Journal(asked.answers) as journal:
        # A question that occurs twice is asked twice; one that was answered with these settings is not.
        left = journal.left([question.said for question in questions], settings=settings)
        if not left:
            print(f"{asked.answers} has an answer to each of {len(questions)} prompts", file=sys.stderr)
            return 0
        requests = [question_request(asked, lm, item, questions[item.number], options) for item in left]
        length = options.get("max_length") or options["length"]
        with (
            progress_bar("answered", "{task.description}") as bar,
            dj.generate_many(lm.model, requests, slots=asked.slots, errors="return", **options) as flight,
        ):
            task = bar.add_task("", total=len(left))
            for index, out in flight:
                about: dict[str, Any] = {"line": questions[left[index].number].line, "settings": settings}
                if isinstance(out, Exception):
                    journal.fail(left[index], out, **about)
                    failures[about["line"]] = out
                else:
                    response, stops = out.tokens[:, -length:], options.get("stop")
                    (text,) = dj.decode_answers(lm.model, lm.tokenizer, response, stops)
                    journal.answer(left[index], text, forwards=int(out.stats.nfe[0]), **about)
                bar.update(task, advance=1, description=f"{len(failures)} failed" if failures else "")
    if failures:
        (line, error), *_ = failures.items()
        first = f"the first in line {line}: {type(error).__name__}: {error}"
        print(f"{len(failures)} of {len(left)} prompts failed, {first}", file=sys.stderr)
    return len(failures)


def question_request(
    asked: GenerateArguments,
    lm: LanguageModel,
    item: JournalRequest,
    question: Question,
    options: dict[str, Any],
) -> dict[str, Any]:
    """A prompt as `generate_many` takes it; raises ValueError, with the line, for one that is no prompt."""
    try:
        ids = chat_ids(lm.tokenizer, question.messages(asked.system), lm.template)
    except ValueError as error:
        raise ValueError(f"{asked.questions}:{question.line}: {error}") from None
    if not options["sampler"].draws:
        return {"prompt": ids}
    # Draws are of the prompt's place: they repeat in every run, whichever prompts are left.
    return {"prompt": ids, "key": jax.random.fold_in(jax.random.key(asked.seed), item.number)}


def settings_of(asked: GenerateArguments, lm: LanguageModel, options: dict[str, Any]) -> dict[str, Any]:
    """All that an answer depends on besides its prompt and, of samplers that draw, its place, as JSON."""
    said = lambda value: expressions.described_call(value) if isinstance(value, Policy | Sampler) else value
    settings = {name: said(value) for name, value in options.items() if name != "stop"}
    settings |= {
        "block": expressions.call(options["block"]),
        "checkpoint": asked.model,
        "identity": lm.identity,
    }
    names = ("chat_template_args", "system", "stop") + (("seed",) if options["sampler"].draws else ())
    return settings | {
        name: value for name in names if (value := getattr(asked, name)) not in (None, (), "{}")
    }


def read_questions(path: Path) -> Iterator[Question]:
    """The prompts of a file, with the numbers of their lines; empty lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file that is not UTF-8, a line that is no JSON object with either a prompt or messages, or
        a text file all of whose lines are JSON with one of them; names file and line.
    """
    if path.suffix.lower() in JSON_LINES:
        for where, value in read_objects(path):
            yield Question(int(where.rpartition(":")[2]), _said(value, where))
        return
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), start=1)]
    texts = [Question(number, line) for number, line in lines if line]
    if texts and all(map(_is_json, texts)):
        raise ValueError(
            f'{path}:{texts[0].line} is a JSON object with "prompt" or "messages", which a text file would '
            f"ask as it is. Name the file {path.stem}.jsonl."
        )
    yield from texts


def _is_json(question: Question) -> bool:
    """Whether a line of text is a line of a .jsonl file."""
    try:
        value = json.loads(str(question.said))
    except ValueError:
        return False
    return isinstance(value, dict) and not {"prompt", "messages"}.isdisjoint(value)


def _said(value: dict[str, Any], where: str) -> str | list[Message]:
    """The prompt of an object: a text, or messages."""
    if ("prompt" in value) == ("messages" in value):
        has = "has both" if "prompt" in value else f"has {', '.join(map(repr, value)) or 'nothing'}"
        raise ValueError(f"{where}: the object {RULE}; it {has}")
    said: Any = value.get("prompt", value.get("messages"))
    is_text = isinstance(said, str) and bool(said.strip())
    is_talk = isinstance(said, list) and bool(said) and all(isinstance(each, dict) for each in said)
    if not (is_text if "prompt" in value else is_talk):
        raise ValueError(f"{where}: {shown(said)}: the object {RULE}")
    return said
