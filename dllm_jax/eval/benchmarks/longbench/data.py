"""Reads LongBench's data set from a local folder: `<task>.jsonl`, one JSON object per line."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm_jax.eval.run.files import read_objects


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
      id: `_id` of the data set, or "line N" where there is none.
      context: the long text.
      input: the question; empty for summaries.
      answers: right answers, at least one.
      classes: all class names of a classification task; else empty.
      line: in the file, from 1.
    """

    id: str
    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]
    line: int


def read(path: Path) -> list[Sample]:
    """The samples of a file in the published form.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is not JSON or not UTF-8, a missing or mistyped field, no reference, or a
        duplicate id; names file and line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: put LongBench's {path.name} there")
    samples: dict[str, Sample] = {}
    for number, row in read_objects(path):
        sample = _sample(row, f"{path}:{number}", number)
        if sample.id in samples:
            same = samples[sample.id].line
            raise ValueError(f"{path}:{number}: _id {sample.id!r} is that of line {same} too")
        samples[sample.id] = sample
    if not samples:
        raise ValueError(f"{path} holds no samples")
    return list(samples.values())


def _sample(row: dict[str, Any], where: str, number: int) -> Sample:
    def field(name: str, kind: str, fits: Callable[[Any], bool]) -> Any:
        if name not in row or not fits(row[name]):
            raise ValueError(f"{where}: field {name!r} is {'no ' + kind if name in row else 'missing'}")
        return row[name]

    text = lambda value: isinstance(value, str)
    texts = lambda value: isinstance(value, list) and all(map(text, value))
    context, question = field("context", "string", text), field("input", "string", text)
    # Without a reference a sample could not be scored; null classes are those of other tasks.
    answers = tuple(field("answers", "list of strings", texts))
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError(f"{where}: answers {list(answers)!r} hold no or an empty reference")
    named = row.get("all_classes") is not None
    classes = tuple(field("all_classes", "list of strings", texts)) if named else ()
    return Sample(str(row.get("_id") or f"line {number}"), context, question, answers, classes, number)
