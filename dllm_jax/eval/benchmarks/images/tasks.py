"""How questions about images are put, where answers end, and how they are scored."""

import dataclasses
import functools
import tomllib
from collections.abc import Sequence
from typing import Annotated, Literal

from dllm_jax.eval.benchmarks.images import metrics
from dllm_jax.eval.benchmarks.images.data import Sample
from dllm_jax.eval.run.runner import Request, Runner
from dllm_jax.options import NoneMeans, Options
from dllm_jax.published.presets import UnknownPreset, presets

Metric = Literal["relaxed", "anls", "exact", "letter"]
FAMILY = "llada-v"  # whose published settings there are


@dataclasses.dataclass(frozen=True)
class ImageTask(Options):
    """A kind of question.

    Attributes:
      metric: "relaxed" (ChartQA), "anls" (DocVQA, InfoVQA), "exact", or "letter" of one of the choices.
      template: of the user's text, with {question} and, where there are any, {choices}: lines "A. ...".
      stop: texts that end an answer, besides the end of turn.
      behind: only what stands behind the last of these in an answer is scored; all of it if there is none.
      name: in results.
    """

    metric: Metric = "exact"
    template: str = "{question}"
    stop: tuple[str, ...] = ()
    behind: Annotated[str | None, NoneMeans("all of the answer")] = None
    name: str = "images"

    def __post_init__(self):
        super().__post_init__()
        if "{question}" not in self.template:
            raise ValueError(f"template={self.template!r} has no {{question}}")
        if self.metric == "letter" and "{choices}" not in self.template:
            raise ValueError(f"template={self.template!r} has no {{choices}}, which metric='letter' needs")
        if not all(self.stop) or self.behind == "":
            raise ValueError(f"stop={self.stop!r} and behind={self.behind!r} must not hold empty texts")

    def text(self, sample: Sample) -> str:
        """The user's text, in which images have the question's placeholders or none.

        Raises:
          ValueError: choices for a template without a place for them, or the other way round.
        """
        if bool(sample.choices) != ("{choices}" in self.template):
            raise ValueError(
                f"{sample.where}: {len(sample.choices)} choices for the template {self.template!r}"
            )
        # The template is split first: what stands in the question or its choices is never filled in.
        pairs = zip(metrics.LETTERS, sample.choices, strict=False)
        choices = "\n".join(f"{name}. {text}" for name, text in pairs)
        before, after = self.template.split("{question}", 1)
        put = lambda text: text.replace("{choices}", choices)  # never into a question that says so itself
        return put(before) + sample.question + put(after)

    def score(self, answer: str, sample: Sample) -> float:
        """Score of an answer in [0, 1], which first loses one full stop at its end, as published."""
        # The full stop, then what was reasoned before the answer.
        answer = (answer[:-1] if answer.endswith(".") else answer).strip()
        if self.behind is not None:
            answer = answer.rpartition(self.behind)[2].strip()
        if self.metric == "letter":
            return max(metrics.letter(answer, reference, sample.choices) for reference in sample.answer)
        metric = {"relaxed": metrics.relaxed, "anls": metrics.anls, "exact": metrics.exact}[self.metric]
        return max(metric(answer, reference) for reference in sample.answer)


def published(name: str) -> ImageTask:
    """The published way of a task; its length, block and steps are `dj.presets.recipe("llada-v", name)`.

    Raises:
      UnknownPreset: no such task; the message lists what there is.
    """
    tasks = tomllib.loads((presets.folder() / "questions" / f"{FAMILY}.toml").read_text(encoding="utf-8"))
    if name not in tasks:
        raise UnknownPreset(f"task={name!r} is not among {FAMILY}'s: {', '.join(tasks)}")
    return ImageTask(**tasks[name] | {"stop": tuple(tasks[name].get("stop", ())), "name": name})


def requests(runner: Runner, task: ImageTask, samples: Sequence[Sample]) -> list[Request]:
    """The questions of a file, in one group; every image is opened to see that it can be.

    Args:
      runner: the model with its settings, which have a length.
      task: how questions are put and scored.
      samples: the questions.

    Raises:
      ValueError: settings without a length; an image that cannot be decoded, a question that does not suit
        the task, or a prompt that is too long, with file and line.
    """
    length, found = runner.decoding.length, []
    if length is None:
        raise ValueError("the response's length is not known: give --length, or a published task")
    for sample in samples:
        text, images = task.text(sample), sample.image
        try:
            one = runner.pictured(sample.id, text, images, length, task.stop, task.name)
        except ValueError as error:
            raise ValueError(f"{sample.where}: {error}") from None
        score = functools.partial(task.score, sample=sample)
        found.append(one._replace(references=sample.answer, score=score))
    return found
