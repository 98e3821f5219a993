"""Reads questions about images: a JSONL file beside its images.

Each line is an object with `id`, `image` (a path, or a list of them, relative to the file's folder and within
it), `question`, `answer` (a text, or a list of texts that are right) and, where it is one of several,
`choices`.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from dllm_jax.eval.benchmarks.images.metrics import LETTERS
from dllm_jax.eval.run.files import read_samples
from dllm_jax.options import Options, shown
from dllm_jax.vision.prompt import IMAGE

FIELDS = ("id", "image", "question", "answer", "choices")


Texts = Annotated[tuple[str, ...], MinLen(1)]


@dataclasses.dataclass(frozen=True)
class Sample(Options):
    """One question.

    Attributes:
      id: unique within the file.
      image: existing files, at least one, in the order in which the question has them.
      question: as many placeholders `<image>` as images, or none: then the images come first.
      answer: right answers, at least one; of a multiple choice the letters of right choices.
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
    def of(cls, row: dict[str, Any], where: str) -> "Sample":
        """The question of a line, whose images must lie in the file's folder."""
        for name in row:
            if name not in FIELDS:
                raise ValueError(f"field {name!r} is not among {', '.join(FIELDS)}")
        given: dict[str, Any] = dict.fromkeys(FIELDS[:-1]) | {n: v for n, v in row.items() if v is not None}
        given |= {name: [text] for name in ("image", "answer") if isinstance(text := given[name], str)}
        if isinstance(given["id"], int) and not isinstance(given["id"], bool):
            given["id"] = str(given["id"])
        found, folder = cls(**given, where=where), Path(where.rpartition(":")[0]).parent
        return dataclasses.replace(found, image=[str(_image(name, folder)) for name in found.image])


def read(path: Path) -> list[Sample]:
    """The questions of a file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is not JSON or not UTF-8; a missing, mistyped or unknown field; an image that is
        not there or not in the file's folder; placeholders that do not match images; an answer that is none
        of the choices; an id that is given twice; no question at all. Names file and line.
    """
    return read_samples(path, Sample.of)


def _image(name: str, folder: Path) -> Path:
    """The file of an image; links are followed before it is asked whether it lies in the folder."""
    path = folder / name
    if "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"image {name!r} must lie in {folder}")
    if not path.is_file():
        raise ValueError(f"image {name!r} does not exist in {folder}")
    return path
