"""Reads questions about images: a JSONL file beside its images.

Each line is an object with `id`, `image` (a path, or a list of them, relative to the file's folder and within
it), `question`, `answer` (a text, or a list of texts that are right) and, where it is one of several,
`choices`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dllm_jax.eval.benchmarks.images.metrics import LETTERS
from dllm_jax.eval.run.files import read_objects
from dllm_jax.options import shown
from dllm_jax.vision.prompt import IMAGE

FIELDS = ("id", "image", "question", "answer", "choices")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
      id: unique within the file.
      images: existing files, at least one, in the order in which the question has them.
      question: as many placeholders `<image>` as images, or none: then the images come first.
      answers: right answers, at least one; of a multiple choice the letters of right choices.
      choices: texts of the choices A, B, C, ...; empty if the answer is free.
      where: file and line, for messages.
    """

    id: str
    images: tuple[Path, ...]
    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    where: str


def read(path: Path) -> list[Sample]:
    """The questions of a file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is not JSON or not UTF-8; a missing, mistyped or unknown field; an image that is
        not there or not in the file's folder; placeholders that do not match images; an answer that is none
        of the choices; an id that is given twice; no question at all. Names file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: expected a JSONL file of questions")
    samples: dict[str, Sample] = {}
    for number, row in read_objects(path):
        sample = _sample(row, path.parent, f"{path}:{number}")
        if sample.id in samples:
            raise ValueError(f"{sample.where}: id {sample.id!r} is that of {samples[sample.id].where} too")
        samples[sample.id] = sample
    if not samples:
        raise ValueError(f"{path} holds no questions")
    return list(samples.values())


def _sample(row: dict[str, Any], folder: Path, where: str) -> Sample:
    for name in row:
        if name not in FIELDS:
            raise ValueError(f"{where}: field {name!r} is not among {', '.join(FIELDS)}")
    question, id = _text(row, "question", where), row.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise ValueError(f"{where}: id={shown(id)} must be a text or a whole number")
    # Placeholders say where each image stands; without any all of them come first.
    images = tuple(_image(name, folder, where) for name in _texts(row, "image", where))
    if (places := question.count(IMAGE)) not in (0, len(images)):
        raise ValueError(f"{where}: the question has {places} placeholders {IMAGE} for {len(images)} images")
    choices = _texts(row, "choices", where) if row.get("choices") is not None else ()
    if len(choices) == 1 or len(choices) > len(LETTERS):
        raise ValueError(f"{where}: {len(choices)} choices; expected 2 to {len(LETTERS)}")
    # A multiple choice is answered by letters, one after each other from A.
    answers = _texts(row, "answer", where)
    if choices and not set(answers) <= set(LETTERS[: len(choices)]):
        raise ValueError(
            f"{where}: answer={shown(row['answer'])} must be among {', '.join(LETTERS[: len(choices)])}, the "
            "letters of the choices"
        )
    return Sample(str(id), images, question, answers, choices, where)


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {name}={shown(value)} must be a text that is not empty")
    return value


def _texts(row: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    """One or more texts."""
    value = row.get(name)
    texts = [value] if isinstance(value, str) and name != "choices" else value
    if not isinstance(texts, list) or not texts:
        raise ValueError(f"{where}: {name}={shown(value)} must be a text or a list of texts, one or more")
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{where}: {name}={shown(value)} must hold texts that are not empty")
    return tuple(texts)


def _image(name: str, folder: Path, where: str) -> Path:
    """The file of an image; links are followed before it is asked whether it lies in the folder."""
    path = folder / name
    if "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{where}: image {name!r} must lie in {folder}")
    if not path.is_file():
        raise ValueError(f"{where}: image {name!r} does not exist in {folder}")
    return path
