"""Reads LongBench's data set from a local folder: `<task>.jsonl`, one JSON object per line."""

import dataclasses
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
    samples: list[Sample] = []
    seen: dict[str, int] = {}
    for number, row in read_objects(path):
        sample = _sample(row, f"{path}:{number}", number)
        if sample.id in seen:
            raise ValueError(f"{path}:{number}: _id {sample.id!r} is that of line {seen[sample.id]} too")
        seen[sample.id] = sample.line
        samples.append(sample)
    if not samples:
        raise ValueError(f"{path} holds no samples")
    return samples


def _sample(row: dict[str, Any], where: str, number: int) -> Sample:
    texts = {name: _text(row, name, where) for name in ("context", "input")}
    answers = _strings(row, "answers", where)
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError(f"{where}: answers {list(answers)!r} hold no or an empty reference")
    classes = _strings(row, "all_classes", where) if row.get("all_classes") is not None else ()
    return Sample(
        str(row.get("_id") or f"line {number}"), **texts, answers=answers, classes=classes, line=number
    )


def _text(row: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(row.get(name), str):
        raise ValueError(f"{where}: field {name!r} is {'missing' if name not in row else 'no string'}")
    return row[name]


def _strings(row: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = row.get(name)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ValueError(
            f"{where}: field {name!r} is {'missing' if name not in row else 'no list of strings'}"
        )
    return tuple(value)
