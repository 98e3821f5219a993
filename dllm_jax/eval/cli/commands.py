"""The evaluations: tasks, LongBench, needle, recall, images; and the comparison of two of their results."""

import dataclasses
from pathlib import Path
from typing import Annotated

import rich.console
import tyro

import dllm_jax as dj
from dllm_jax.checkpoint.files import sha256
from dllm_jax.eval.benchmarks import images, longbench, needle, synthetic
from dllm_jax.eval.cli.options import JOURNAL, WITHOUT_PREFIX, Difficulty, EvalOptions, Limit, task_of
from dllm_jax.eval.results import record, show
from dllm_jax.eval.results.comparison import compare_records
from dllm_jax.eval.run.runner import Runner
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.vision.tower import AT_ONCE

Shared = Annotated[EvalOptions, WITHOUT_PREFIX]
DEFAULTS = EvalOptions()
DEPTHS = (0.0, 11.0, 22.0, 33.0, 44.0, 56.0, 67.0, 78.0, 89.0, 100.0)


def run_tasks(
    options: Shared = DEFAULTS, task: str = "FewShot", sizes: Difficulty = (5,), count: Limit = 32
) -> int:
    """Measures exact match on held-out examples of a task of `dllm_jax.tasks`.

    Without --length, responses are as long as the longest answer and its end need.

    Args:
      options: Model and decoding.
      task: Task, as a constructor call.
      sizes: Sizes of the questions: examples of each kind (FewShot), steps (Chain), pairs (Recall), letters
        (Sorting).
      count: Number of questions of each size.
    """
    chosen = task_of(task)
    settings = {"task": repr(chosen), "sizes": list(sizes), "count": count}
    ask = lambda runner: synthetic.synthetic_requests(runner, chosen, sizes, count)
    return options.with_length(synthetic.response(chosen, sizes)).evaluate("tasks", settings, ask)


def run_longbench(
    data: Path,
    options: Shared = DEFAULTS,
    prompts: Path | None = None,
    tasks: tuple[str, ...] = (),
    truncate_to: int | None = None,
    limit: int | None = None,
    answer_length: int | None = None,
) -> int:
    """Runs LongBench's English tasks, from a local copy of the data set.

    Answers have the task's length. --steps is the number of steps of each of them; --length L with --steps S
    means S steps for L positions instead, so that longer answers have more steps.

    Args:
      data: Folder with LongBench's <task>.jsonl.
      options: Model and decoding.
      prompts: LongBench's dataset2prompt.json. Default: the one in the data folder.
      tasks: Names of the tasks. Default: all 16.
      truncate_to: Maximum tokens of a prompt; longer ones lose their middle. The paper's max_length: 3500,
        7500, 15500 or 31500. None: never.
      limit: Number of samples of each task, from the first. Default: all.
      answer_length: Number of tokens to generate for every task. Default: the published ones.
    """
    # Answers have their task's length: --length alone says nothing, and is refused with what it may mean.
    given, limit = options.decoding, check_argument("limit", limit, PositiveInt | None)
    if given.length is not None and answer_length is not None:
        raise ValueError(f"--length {given.length} and --answer-length {answer_length}: give one of them")
    if given.length is not None and given.steps is None:
        raise ValueError(
            f"--length {given.length}: answers have the task's length; --answer-length {given.length} sets "
            "that of all tasks, and --length with --steps says how many steps so many positions take"
        )
    decoding = dataclasses.replace(given, length=given.length or answer_length)
    # The hash of the templates is in the record: other templates ask other questions.
    templates, chosen = (
        longbench.LongBenchPrompts.read(prompts or data / longbench.FILE),
        longbench.tasks_named(tasks),
    )
    settings = {"tasks": [task.name for task in chosen], "prompts_sha256": templates.sha256}
    cut = {"truncate_to": truncate_to, "limit": limit, "answer_length": answer_length}
    ask = lambda runner: longbench.longbench_requests(runner, data, templates, chosen, *cut.values())
    return dataclasses.replace(options, decoding=decoding).evaluate("longbench", settings | cut, ask)


def run_needle(
    haystack: Path,
    options: Shared = DEFAULTS,
    lengths: tuple[int, ...] = (1000, 2000, 4000),
    depths: tuple[float, ...] = DEPTHS,
    scoring: needle.Scoring = "rouge",
    buffer: int | None = None,
    needle_file: Path | None = None,
    chat: bool = False,
) -> int:
    """Hides a needle in a haystack of text, by prompt length and depth.

    Args:
      haystack: Text file, or folder of .txt files.
      options: Model and decoding.
      lengths: Lengths of prompts, in tokens.
      depths: Depths of the needle, in percent.
      scoring: Score of answers: rouge (DuoAttention) or keyword (LongLLaDA).
      buffer: Tokens of the length reserved for template and answer. Default: 200 for rouge, 600 for keyword.
      needle_file: JSON file with text, question, keyword and template. Default: DuoAttention's needle.
      chat: Wrap prompts in the chat template.
    """
    # The protocol decides scoring and the room for template and answer; the file only what is hidden.
    hidden = needle.DUO_ATTENTION if needle_file is None else needle.read_needle(needle_file)
    reserved = {"rouge": 200, "keyword": 600}[scoring] if buffer is None else buffer
    hidden = dataclasses.replace(hidden, scoring=scoring, buffer=reserved)
    text = needle.haystack(haystack)
    ask = lambda runner: needle.needle_requests(runner, hidden, text, lengths, depths, chat)
    settings = {"lengths": lengths, "depths": depths, "chat": chat, **dataclasses.asdict(hidden)}
    return options.with_length(needle.RESPONSE).evaluate("needle", settings, ask)


def run_recall(
    options: Shared = DEFAULTS,
    lengths: tuple[int, ...] = (64, 256, 1024),
    depths: tuple[float, ...] = DEPTHS,
    repeats: int = 4,
) -> int:
    """Runs the bundled models' needle task: a pair among pairs and filler, by prompt length and depth.

    Args:
      options: Model and decoding.
      lengths: Lengths of prompts, in tokens.
      depths: Depths of the needle, in percent.
      repeats: Number of examples for each length and depth.
    """
    settings = {"lengths": lengths, "depths": depths, "repeats": repeats}
    ask = lambda runner: synthetic.recall(runner, lengths, depths, repeats)
    return options.with_length(synthetic.RECALLED).evaluate("recall", settings, ask)


def run_images(
    data: Path,
    options: Shared = DEFAULTS,
    task: str | None = None,
    metric: images.PictureMetric | None = None,
    template: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None,
    stop: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="TEXT...")] = None,
    behind: Annotated[str | None, tyro.conf.arg(name="answer-after", metavar="TEXT")] = None,
    limit: int | None = None,
    drop_first_id: bool = True,
    newline: bool = False,
    exif: bool = False,
    at_once: int = AT_ONCE,
) -> int:
    """Asks and scores questions about images as in LLaDA-V's evaluation.

    Args:
      data: JSONL file: {"id": "1", "image": "chart.png", "question": "..", "answer": ".."} in each line;
        image and answer may be lists; a multiple choice has "choices": [..] and letters as answers.
      options: Model and decoding.
      task: Published settings: chartqa, docvqa, infovqa, multiple-choice or word. They are length, block and
        steps, unless --length is given, and the four options below as far as those are not given. None: the
        question as it is, exact match, and --length is needed.
      metric: Score of answers: relaxed (ChartQA), anls (DocVQA), exact, or letter of a choice.
      template: Template of the user's text, with {question}, and {choices} for multiple choice.
      stop: Texts that end an answer.
      behind: Text after whose last occurrence the answer is scored. Default: all of the answer.
      limit: Number of questions to ask, from the first.
      drop_first_id: Leave out the first id after an image, as in the reference implementation but unlike in
        training.
      newline: End each of several images with a newline, as in training but unlike in the reference
        implementation.
      exif: Rotate images by their EXIF orientation, unlike in the reference implementation.
      at_once: Number of views that the vision tower processes at once, which bounds its memory.
    """
    # The published way of the task, changed by the options that are given with it.
    given = {"metric": metric, "template": template, "stop": stop, "behind": behind}
    kind = images.ImageTask() if task is None else images.published(task)
    kind = dataclasses.replace(kind, **{name: value for name, value in given.items() if value is not None})
    samples = images.read_pictures(data)[: check_argument("limit", limit, PositiveInt | None)]
    # Published blocks and steps are of the published length: another length goes without them.
    decoding = options.decoding
    if task is not None and decoding.length is None:
        recipe = dj.presets.recipe(images.FAMILY, task)
        names = [name for name in ("length", "block", "steps") if getattr(decoding, name) is None]
        decoding = dataclasses.replace(decoding, **{name: getattr(recipe, name) for name in names})
    options = dataclasses.replace(options, decoding=decoding)

    def ready(runner: Runner) -> Runner:
        reading = dict(
            tokenizer=runner.lm.tokenizer, several=dj.vision.Pad(newline), drop_first_id=drop_first_id
        )
        processor = dj.vision.Processor.load(options.checkpoint.path, **reading, exif=exif, at_once=at_once)
        return runner.with_images(processor)

    # All of a processor's options that change an answer are in the record.
    settings = dataclasses.asdict(kind) | {"data_sha256": sha256(data), "limit": limit}
    settings |= {"drop_first_id": drop_first_id, "newline": newline, "exif": exif}
    ask = lambda runner: images.picture_requests(runner, kind, samples)
    return options.evaluate("images", settings, ask, ready=ready)


def run_merge(out: tyro.conf.Positional[Path], parts: tyro.conf.Positional[tuple[Path, ...]]) -> int:
    """Merges the journals of an evaluation's parts; the evaluation with --out OUT then writes the results.

    Args:
      out: Folder of the journal that receives all answers.
      parts: Folders of the parts (their --out).
    """
    added = dj.Journal(out / JOURNAL).merge([folder / JOURNAL for folder in parts])
    print(f"{added} answers added to {out / JOURNAL}")
    return 0


def run_compare(
    a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], confidence: float = 0.95, seed: int = 0
) -> int:
    """Compares two results, paired by request, with bootstrap confidence intervals.

    Args:
      a: First result, a JSON file.
      b: Second result of the same evaluation.
      confidence: Confidence level of the intervals, in (0, 1).
      seed: Random seed of the resampling.
    """
    console = rich.console.Console()
    result = compare_records(record.read(a), record.read(b), confidence, seed=seed)
    for table in show.compared_tables(result, (str(a), str(b)), confidence):
        console.print(table)
    same = f"{result.same:.1%} of the answers are the same"
    console.print(f"{same}; {result.unpaired} requests without a partner")
    return 0
