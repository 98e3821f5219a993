"""What a task is: text prompts with one right answer, drawn from a seed, in two halves that cannot meet."""

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

Split = Literal["train", "held_out"]


class Example(NamedTuple):
    """A question and its answer.

    Attributes:
      prompt: what the user says.
      answer: what the assistant must say, exactly.
    """

    prompt: str
    answer: str


@runtime_checkable
class Task(Protocol):
    """A family of questions of adjustable size; an instance is frozen and hashable.

    `example` decides the split by a property of the example itself (a checksum, say), never by chance, so
    that no seed and no number of draws can make a held-out example appear in training.
    """

    @property
    def name(self) -> str:
        """Short, for tables."""
        ...

    def answer_length(self, size: int) -> int:
        """Most characters of an answer to an example of the given size."""
        ...

    def example(self, rng: np.random.Generator, size: int, split: Split) -> Example:
        """Draws an example of the given size (number of pairs, digits, ...).

        Raises:
          ValueError: a size that the task does not have.
        """
        ...

    def split_of(self, example: Example) -> Split:
        """The half an example belongs to; agrees with how it was drawn."""
        ...


def examples(task: Task, seed: int | tuple[int, ...], size: int, count: int, split: Split) -> list[Example]:
    """`count` examples as a pure function of the arguments; they may repeat in tiny tasks."""
    rng = np.random.default_rng([*(seed if isinstance(seed, tuple) else (seed,)), size])
    return [task.example(rng, size, split) for _ in range(count)]


def exact(answers: list[str], wanted: list[Example]) -> list[bool]:
    """Which answers equal the right one, surrounding white space aside.

    Raises:
      ValueError: not one answer per example.
    """
    if len(answers) != len(wanted):
        raise ValueError(f"{len(answers)} answers for {len(wanted)} examples")
    return [answer.strip() == example.answer for answer, example in zip(answers, wanted, strict=True)]
