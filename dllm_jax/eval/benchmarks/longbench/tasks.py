"""LongBench's English tasks: metric, answer length, use of the chat template, where answers end."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from dllm_jax.eval.benchmarks.longbench import metrics

Kind = Literal["f1", "rouge", "classification", "count", "retrieval", "code"]
FEW_SHOT = ("trec", "triviaqa", "samsum")
PLAIN = (*FEW_SHOT, "lcc", "repobench-p")  # their prompts go without the chat template


@dataclasses.dataclass(frozen=True)
class LongBenchTask:
    """One data set.

    Attributes:
      name: of the data set and its file.
      kind: the metric.
      length: answer tokens at most.
    """

    name: str
    kind: Kind
    length: int

    @property
    def chat(self) -> bool:
        """The prompt is wrapped in the chat template, if the checkpoint has one."""
        return self.name not in PLAIN

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return ("\n",) if self.name == "samsum" else ()

    def check(self, references: Sequence[str], classes: Sequence[str]):
        """Raises ValueError, saying why, if answers to a sample could not be scored."""
        if self.kind == "classification" and not classes:
            raise ValueError(f"it lacks all_classes, which {self.name} needs")
        if self.kind == "retrieval":
            self.score("", references)

    def score(self, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
        """Score of a sample in [0, 1].

        Args:
          prediction: the answer.
          references: right answers, of which the best counts.
          classes: names of all classes, for classification.
        """
        if self.name in FEW_SHOT:
            prediction = metrics.first_line(prediction)
        metric = {
            "f1": metrics.f1,
            "rouge": metrics.rouge_l,
            "classification": lambda p, r: metrics.classification(p, r, classes),
            "count": metrics.count,
            "retrieval": metrics.retrieval,
            "code": metrics.edit_similarity,
        }[self.kind]
        return metrics.score(metric, prediction, references)


TASKS: dict[str, LongBenchTask] = {
    task.name: task
    for task in (
        LongBenchTask("narrativeqa", "f1", 128),
        LongBenchTask("qasper", "f1", 128),
        LongBenchTask("multifieldqa_en", "f1", 64),
        LongBenchTask("hotpotqa", "f1", 32),
        LongBenchTask("2wikimqa", "f1", 32),
        LongBenchTask("musique", "f1", 32),
        LongBenchTask("gov_report", "rouge", 512),
        LongBenchTask("qmsum", "rouge", 512),
        LongBenchTask("multi_news", "rouge", 512),
        LongBenchTask("trec", "classification", 64),
        LongBenchTask("triviaqa", "f1", 32),
        LongBenchTask("samsum", "rouge", 128),
        LongBenchTask("passage_count", "count", 32),
        LongBenchTask("passage_retrieval_en", "retrieval", 32),
        LongBenchTask("lcc", "code", 64),
        LongBenchTask("repobench-p", "code", 64),
    )
}


def tasks_named(names: Sequence[str]) -> list[LongBenchTask]:
    """The tasks of these names, or all of them if there are none.

    Raises:
      ValueError: an unknown name.
    """
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not among LongBench's English tasks: {', '.join(TASKS)}")
    return [TASKS[name] for name in names] or list(TASKS.values())
