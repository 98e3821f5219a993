"""LongBench's English tasks: metric, answer length, use of the chat template, where answers end."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from dllm_jax.eval.benchmarks.longbench import metrics

# As published: prompts that are texts to be continued, few-shot examples and code, are no turns of a chat.
FEW_SHOT = ("trec", "triviaqa", "samsum")
PLAIN = (*FEW_SHOT, "lcc", "repobench-p")  # their prompts go without the chat template


@dataclasses.dataclass(frozen=True)
class LongBenchTask:
    """One data set.

    Attributes:
      name: of the data set and its file.
      metric: of a prediction and a reference; classification takes the classes too.
      length: answer tokens at most.
    """

    name: str
    metric: Callable[..., float]
    length: int

    @property
    def chat(self) -> bool:
        """The prompt is wrapped in the chat template, if the checkpoint has one."""
        return self.name not in PLAIN

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        # Behind its summary a few-shot model goes on with the next dialogue.
        return ("\n",) if self.name == "samsum" else ()

    def check(self, references: Sequence[str], classes: Sequence[str]):
        """Raises ValueError, saying why, if answers to a sample could not be scored."""
        if self.metric is metrics.classification and not classes:
            raise ValueError(f"it lacks all_classes, which {self.name} needs")
        if self.metric is metrics.retrieval:
            self.score("", references)

    def score(self, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
        """Score of a sample in [0, 1].

        Args:
          prediction: the answer.
          references: right answers, of which the best counts.
          classes: names of all classes, for classification.
        """
        # When it is scored, not when it is decoded: the journal keeps the whole answer.
        if self.name in FEW_SHOT:
            prediction = metrics.first_line(prediction)
        metric = self.metric
        if metric is metrics.classification:
            metric = functools.partial(metric, classes=classes)
        return metrics.score(metric, prediction, references)


TASKS: dict[str, LongBenchTask] = {
    task.name: task
    for task in (
        # Questions about one document, then about several.
        LongBenchTask("narrativeqa", metrics.f1, 128),
        LongBenchTask("qasper", metrics.f1, 128),
        LongBenchTask("multifieldqa_en", metrics.f1, 64),
        LongBenchTask("hotpotqa", metrics.f1, 32),
        LongBenchTask("2wikimqa", metrics.f1, 32),
        LongBenchTask("musique", metrics.f1, 32),
        # Summaries.
        LongBenchTask("gov_report", metrics.rouge_l, 512),
        LongBenchTask("qmsum", metrics.rouge_l, 512),
        LongBenchTask("multi_news", metrics.rouge_l, 512),
        # Few-shot tasks, synthetic ones, and code.
        LongBenchTask("trec", metrics.classification, 64),
        LongBenchTask("triviaqa", metrics.f1, 32),
        LongBenchTask("samsum", metrics.rouge_l, 128),
        LongBenchTask("passage_count", metrics.count, 32),
        LongBenchTask("passage_retrieval_en", metrics.retrieval, 32),
        LongBenchTask("lcc", metrics.edit_similarity, 64),
        LongBenchTask("repobench-p", metrics.edit_similarity, 64),
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
