"""LongBench (arXiv:2308.14508), English tasks: published prompts, truncation, lengths, where answers end.

The data are in a local folder: `<task>.jsonl`, one JSON object per line. The templates are read from the
benchmark's own file, `dataset2prompt.json` (in `config/` of github.com/THUDM/LongBench), so that they are
exactly the published ones. A prompt that is too long loses its middle, since questions stand at either end;
published lengths (max_length in config/model2maxlen.json) are 3500, 7500, 15500 and 31500 tokens: the model's
window less 500 to 1000.

The authors end answers of samsum at a newline, which may not come first. Here decoding goes on, as an answer
may begin with one: the first line is what is scored.

lm_eval 0.4.13 has these tasks too, and scores 3 of 97 recorded answers otherwise, those that begin with an
empty line. It keeps the end of a long prompt.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from dllm_jax.checkpoint.files import sha256
from dllm_jax.eval.benchmarks import metrics
from dllm_jax.eval.run.files import read_json, read_samples
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import LanguageModel
from dllm_jax.options import Options, shown
from dllm_jax.state.text import decode, encode_plain

FILE = "dataset2prompt.json"

# As published: prompts that are texts to be continued, few-shot examples and code, are no turns of a chat.
FEW_SHOT = ("trec", "triviaqa", "samsum")
PLAIN = (*FEW_SHOT, "lcc", "repobench-p")  # their prompts go without the chat template


@dataclasses.dataclass(frozen=True)
class LongBenchTask:
    """One data set.

    Attributes:
      name: Name of the data set and its file.
      metric: Metric of a prediction and a reference; classification takes the classes too.
      length: Maximum number of answer tokens.
    """

    name: str
    metric: Callable[..., float]
    length: int

    @property
    def chat(self) -> bool:
        """The prompt is wrapped in the chat template, if the checkpoint has one."""
        return self.name not in PLAIN

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
        # The first line after leading newlines is all that counts of a few-shot task's prediction. It is cut
        # when it is scored, not when it is decoded: the journal keeps the whole answer.
        if self.name in FEW_SHOT:
            prediction = prediction.lstrip("\n").split("\n")[0]
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
        LongBenchTask("passage_count", metrics.count_score, 32),
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
        raise ValueError(f"{shown(unknown[0])} is not among LongBench's English tasks: {', '.join(TASKS)}")
    return [TASKS[name] for name in names] or list(TASKS.values())


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
            raise ValueError(f"answers={shown(self.answers)} hold an empty reference")

    @classmethod
    def of(cls, row: Any, where: str) -> "Sample":
        """The sample of a line in the published form; null classes are those of other tasks."""
        id = row.get("_id") or f"line {where.rpartition(':')[2]}"
        classes = () if row.get("all_classes") is None else row["all_classes"]
        return cls(str(id), row.get("context"), row.get("input"), row.get("answers"), classes, where)


def samples_in(path: Path) -> list[Sample]:
    """The samples of a file in the published form.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a line that is not JSON or not UTF-8, a missing or mistyped field, no reference, or a
        duplicate id; names file and line.
    """
    return read_samples(path, Sample.of)


@dataclasses.dataclass(frozen=True)
class LongBenchPrompts:
    """Templates with {context} and, except for summaries, {input}.

    Attributes:
      templates: Templates by task.
      sha256: Hash of the file.
    """

    templates: dict[str, str]
    sha256: str

    @staticmethod
    def read(path: Path) -> "LongBenchPrompts":
        """Reads the published file.

        Raises:
          FileNotFoundError: no such file.
          ValueError: it is not UTF-8 or not an object of strings, or a template lacks {context}.
        """
        if not path.is_file():
            reason = f"take {FILE} from config/ of LongBench's repository"
            raise FileNotFoundError(f"{path} does not exist: {reason}")
        templates = read_json(path)
        if not isinstance(templates, dict) or not all(isinstance(t, str) for t in templates.values()):
            raise ValueError(f"{path}: expected an object of task names and templates")
        for name in set(templates) & set(TASKS):
            if "{context}" not in templates[name]:
                raise ValueError(f"{path}: the template of {shown(name)} has no {{context}}")
        return LongBenchPrompts(templates, sha256(path))

    def ids(
        self, task: LongBenchTask, sample: Sample, lm: LanguageModel, truncate_to: int | None
    ) -> list[int]:
        """Token ids of a sample's prompt.

        Args:
          task: the data set.
          sample: the question.
          lm: Model whose tokenizer and chat template are used.
          truncate_to: Number of tokens to which a longer filled template is cut in the middle, give or take
            a few (`truncate`). None: no limit.

        Raises:
          ValueError: the file has no template for the task.
        """
        if task.name not in self.templates:
            raise ValueError(f"{FILE} has no template for {shown(task.name)}")

        # Both at once: a context that happens to hold "{input}" is not filled in itself.
        fields = {"{context}": sample.context, "{input}": sample.input}
        text = re.sub(r"\{(?:context|input)\}", lambda match: fields[match[0]], self.templates[task.name])
        # As published: the filled template is cut, and only then wrapped in the chat template.
        text = text if truncate_to is None else truncate(text, lm.tokenizer, truncate_to)
        if task.chat and lm.tokenizer.chat_template is not None:
            return lm.chat_ids(text)
        return encode_plain(lm.tokenizer, text, add_special_tokens=True)


def truncate(text: str, tokenizer: Any, truncate_to: int) -> str:
    """The text without its middle, about `truncate_to` tokens long (the paper's max_length).

    The first and the last int(truncate_to / 2) tokens are decoded separately, without special tokens, and
    joined; as published, the result may be a few tokens longer or shorter.

    Raises:
      ValueError: truncate_to below 2.
    """
    if truncate_to < 2:
        raise ValueError(f"truncate_to={truncate_to} must be at least 2")
    ids = encode_plain(tokenizer, text, add_special_tokens=True)
    if len(ids) <= truncate_to:
        return text

    # The halves are decoded apart and joined as text: where they meet, encoding again may give other tokens.
    half = truncate_to // 2
    return "".join(decode(tokenizer, part) for part in (ids[:half], ids[-half:]))


def longbench_requests(
    runner: Runner,
    data: Path,
    prompts: LongBenchPrompts,
    chosen: Sequence[LongBenchTask],
    truncate_to: int | None = None,
    limit: int | None = None,
    length: int | None = None,
) -> list[EvalRequest]:
    """The samples of tasks, a group per task; all of them can be scored.

    Args:
      runner: the model with its settings.
      data: the folder with `<task>.jsonl`.
      prompts: the published templates.
      chosen: the tasks.
      truncate_to: longer prompts lose their middle, see `truncate`; in tokens. None: never.
      limit: only the first samples of each task.
      length: response positions of every task, instead of the published ones (LongLLaDA decodes 512).

    Raises:
      FileNotFoundError: a data file is missing.
      ValueError: bad data, with file and line; or block or steps that do not fit a task's answers.
    """
    # All that can be refused is refused before the first answer is decoded: shapes, then samples.
    made: list[EvalRequest] = []
    for task in chosen:
        try:
            runner.decoding.at(length or task.length)
        except ValueError as error:
            raise ValueError(f"{task.name}, answers of {length or task.length} positions: {error}") from None
    for task in chosen:
        samples = samples_in(data / f"{task.name}.jsonl")
        for sample in samples:
            try:
                task.check(sample.answers, sample.classes)
            except ValueError as error:
                raise ValueError(f"{sample.where}: sample {shown(sample.id)}: {error}") from None
        for sample in samples[:limit]:
            ids = tuple(prompts.ids(task, sample, runner.lm, truncate_to))
            request = EvalRequest(sample.id, ids, length or task.length, group=task.name)
            score = functools.partial(task.score, references=sample.answers, classes=sample.classes)
            made.append(request._replace(references=sample.answers, score=score))
    return made
