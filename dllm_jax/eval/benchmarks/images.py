"""Questions about images: read from a JSONL file next to its images, put, ended and scored as published.

Each line is an object with `id`, `image` (a path, or a list of them, relative to the file's folder and within
it), `question`, `answer` (a text, or a list of texts that are right) and, where it is one of several,
`choices`.
"""

import dataclasses
import functools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from dllm_jax.eval.benchmarks import metrics
from dllm_jax.eval.benchmarks.metrics import LETTERS
from dllm_jax.eval.run.files import read_samples
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.options import NoneMeans, Options, shown
from dllm_jax.published.presets import UnknownPreset, presets
from dllm_jax.vision.prompt import IMAGE

FIELDS = ("id", "image", "question", "answer", "choices")
Texts = Annotated[tuple[str, ...], MinLen(1)]
PictureMetric = Literal["relaxed", "anls", "exact", "letter"]
FAMILY = "llada-v"  # whose published settings there are


@dataclasses.dataclass(frozen=True)
class PictureSample(Options):
    """One question.

    Attributes:
      id: unique within the file.
      image: existing files, at least one, in the order in which the question has them.
      question: Text with one placeholder `<image>` per image, or none: then the images come first.
      answer: Right answers, at least one; for multiple choice, the letters of the right choices.
      choices: texts of the choices A, B, C, ...; empty if the answer is free.
      where: file and line, for messages.
    """

    id: str
    image: Texts
    question: str
    answer: Texts
    choices: tuple[str, ...] = ()
    where: str = ""

    def __post_init__(self):
        super().__post_init__()
        for name in ("image", "question", "answer", "choices"):
            value = getattr(self, name)
            if not all(text.strip() for text in (value if isinstance(value, tuple) else (value,))):
                raise ValueError(f"{name}={shown(value)} must hold texts that are not empty")
        # Placeholders say where each image stands; without any all of them come first.
        if (places := self.question.count(IMAGE)) not in (0, len(self.image)):
            raise ValueError(f"the question has {places} placeholders {IMAGE} for {len(self.image)} images")
        if len(self.choices) == 1 or len(self.choices) > len(LETTERS):
            raise ValueError(f"{len(self.choices)} choices; expected 2 to {len(LETTERS)}")
        # A multiple choice is answered by letters, one after each other from A.
        letters = LETTERS[: len(self.choices)]
        if self.choices and not set(self.answer) <= set(letters):
            reason = f"must be among {', '.join(letters)}, the letters of the choices"
            raise ValueError(f"answer={shown(self.answer)} {reason}")

    @classmethod
    def of(cls, row: dict[str, Any], where: str) -> "PictureSample":
        """The question of a line, whose images must lie in the file's folder."""
        for name in row:
            if name not in FIELDS:
                raise ValueError(f"field {shown(name)} is not among {', '.join(FIELDS)}")
        # A single text stands for a list of one, and a whole number for its digits.
        given: dict[str, Any] = dict.fromkeys(FIELDS[:-1]) | {n: v for n, v in row.items() if v is not None}
        given |= {name: [text] for name in ("image", "answer") if isinstance(text := given[name], str)}
        if isinstance(given["id"], int) and not isinstance(given["id"], bool):
            given["id"] = str(given["id"])
        sample, folder = cls(**given, where=where), Path(where.rpartition(":")[0]).parent
        return dataclasses.replace(sample, image=[str(_image(name, folder)) for name in sample.image])


def read_pictures(path: Path) -> list[PictureSample]:
    """The questions of a file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is not JSON or not UTF-8; a missing, mistyped or unknown field; an image that is
        not there or not in the file's folder; placeholders that do not match images; an answer that is none
        of the choices; an id that is given twice; no question at all. Names file and line.
    """
    return read_samples(path, PictureSample.of)


def _image(name: str, folder: Path) -> Path:
    """The file of an image; links are followed before it is asked whether it lies in the folder."""
    path = folder / name
    if "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"image {shown(name)} must lie in {folder}")
    try:
        there = path.is_file()
    except OSError:  # a name that is too long, such as an image in base64
        there = False
    if not there:
        raise ValueError(f"image {shown(name)} does not exist in {folder}")
    return path


@dataclasses.dataclass(frozen=True)
class ImageTask(Options):
    """A kind of question.

    Attributes:
      metric: "relaxed" (ChartQA), "anls" (DocVQA, InfoVQA), "exact", or "letter" of one of the choices.
      template: Template of the user's text, with {question} and, for multiple choice, {choices}: lines "A.
        ...".
      stop: Texts that end an answer, in addition to the end of turn.
      behind: Texts after the last of which an answer is scored; without one, all of it is scored.
      name: Name in results.
    """

    metric: PictureMetric = "exact"
    template: str = "{question}"
    stop: tuple[str, ...] = ()
    behind: Annotated[str | None, NoneMeans("all of the answer")] = None
    name: str = "images"

    def __post_init__(self):
        super().__post_init__()
        if "{question}" not in self.template:
            raise ValueError(f"template={shown(self.template)} has no {{question}}")
        if self.metric == "letter" and "{choices}" not in self.template:
            raise ValueError(
                f"template={shown(self.template)} has no {{choices}}, which metric='letter' needs"
            )
        if not all(self.stop) or self.behind == "":
            raise ValueError(
                f"stop={shown(self.stop)} and behind={shown(self.behind)} must not hold empty texts"
            )

    def text(self, sample: PictureSample) -> str:
        """The user's text, in which images have the question's placeholders or none.

        Raises:
          ValueError: choices for a template without a place for them, or the other way round.
        """
        if bool(sample.choices) != ("{choices}" in self.template):
            count = f"{len(sample.choices)} choices for the template {shown(self.template)}"
            fix = "multiple-choice questions need a file and a task of their own"
            raise ValueError(f"{sample.where}: {count}: {fix}")
        # The template is split first: what stands in the question or its choices is never filled in.
        pairs = zip(LETTERS, sample.choices, strict=False)
        choices = "\n".join(f"{name}. {text}" for name, text in pairs)
        before, after = self.template.split("{question}", 1)
        put = lambda text: text.replace("{choices}", choices)  # never into a question that says so itself
        return put(before) + sample.question + put(after)

    def score(self, answer: str, sample: PictureSample) -> float:
        """Score of an answer in [0, 1], which first loses one full stop at its end, as published."""
        # The full stop, then what was reasoned before the answer.
        answer = (answer[:-1] if answer.endswith(".") else answer).strip()
        if self.behind is not None:
            answer = answer.rpartition(self.behind)[2].strip()
        if self.metric == "letter":
            return max(metrics.letter(answer, reference, sample.choices) for reference in sample.answer)
        metric = {"relaxed": metrics.relaxed, "anls": metrics.anls, "exact": metrics.exact_score}[self.metric]
        return max(metric(answer, reference) for reference in sample.answer)


def published(name: str) -> ImageTask:
    """The published way of a task; its length, block and steps are `dj.presets.recipe("llada-v", name)`.

    Raises:
      UnknownPreset: no such task; the message lists what there is.
    """
    tasks = tomllib.loads((presets.folder() / "questions" / f"{FAMILY}.toml").read_text(encoding="utf-8"))
    if name not in tasks:
        raise UnknownPreset(f"task={shown(name)} is not among {FAMILY}'s: {', '.join(tasks)}")
    return ImageTask(**tasks[name] | {"stop": tuple(tasks[name].get("stop", ())), "name": name})


def picture_requests(runner: Runner, task: ImageTask, samples: Sequence[PictureSample]) -> list[EvalRequest]:
    """The questions of a file, in one group; every image is opened to see that it can be.

    Args:
      runner: the model with its settings, which have a length.
      task: Kind of the questions.
      samples: the questions.

    Raises:
      ValueError: settings without a length; an image that cannot be decoded, a question that does not suit
        the task, or a prompt that is too long, with file and line.
    """
    length, made = runner.decoding.length, []
    if length is None:
        raise ValueError("the response's length is not known: give --length, or a published task")
    for sample in samples:
        text, images = task.text(sample), sample.image
        try:
            request = runner.pictured(sample.id, text, images, length, task.stop, task.name)
        except ValueError as error:
            raise ValueError(f"{sample.where}: {error}") from None
        score = functools.partial(task.score, sample=sample)
        made.append(request._replace(references=sample.answer, score=score))
    return made
