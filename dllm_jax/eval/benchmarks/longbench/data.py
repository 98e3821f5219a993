"""Reads LongBench's data set from a local folder: `<task>.jsonl`, one JSON object per line."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from dllm_jax.eval.run.files import read_samples
from dllm_jax.options import Options


@dataclasses.dataclass(frozen=True)
class Sample(Options):
    """One question.

    Attributes:
      id: `_id` of the data set, or "line N" where there is none.
      context: the long text.
      input: the question; empty for summaries.
      answers: right answers, at least one.
      classes: all class names of a classification task; else empty.
      where: file and line, for messages.
    """

    id: str
    context: str
    input: str
    answers: Annotated[tuple[str, ...], MinLen(1)]
    classes: tuple[str, ...]
    where: str

    def __post_init__(self):
        super().__post_init__()
        # Without a reference a sample could not be scored.
        if not all(answer.strip() for answer in self.answers):
            raise ValueError(f"answers={self.answers!r} hold an empty reference")

    @classmethod
    def of(cls, row: Any, where: str) -> "Sample":
        """The sample of a line in the published form; null classes are those of other tasks."""
        id = row.get("_id") or f"line {where.rpartition(':')[2]}"
        classes = () if row.get("all_classes") is None else row["all_classes"]
        return cls(str(id), row.get("context"), row.get("input"), row.get("answers"), classes, where)


def read(path: Path) -> list[Sample]:
    """The samples of a file in the published form.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is not JSON or not UTF-8, a missing or mistyped field, no reference, or a
        duplicate id; names file and line.
    """
    return read_samples(path, Sample.of)
