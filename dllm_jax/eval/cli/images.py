"""`images`: questions about images in a local file, for LLaDA-V."""

import dataclasses
from pathlib import Path
from typing import Annotated

from dllm_jax.checkpoint.files import sha256
from dllm_jax.eval.benchmarks.images import ImageTask, published, read, requests
from dllm_jax.eval.benchmarks.images.tasks import FAMILY, Metric
from dllm_jax.eval.cli.options import WITHOUT_PREFIX, Options
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.published.presets import presets
from dllm_jax.vision.images import Pad
from dllm_jax.vision.processor import Processor
from dllm_jax.vision.tower import AT_ONCE

DEFAULTS = Options()


def run_images(
    data: Path,
    options: Annotated[Options, WITHOUT_PREFIX] = DEFAULTS,
    task: str | None = None,
    metric: Metric | None = None,
    template: str | None = None,
    stop: tuple[str, ...] | None = None,
    behind: str | None = None,
    limit: int | None = None,
    drop_first_id: bool = True,
    newline: bool = False,
    exif: bool = False,
    at_once: int = AT_ONCE,
) -> int:
    """Questions about images, put and scored as LLaDA-V's evaluation does.

    Args:
      data: a JSONL file: {"id": "1", "image": "chart.png", "question": "..", "answer": ".."} in each line;
        image and answer may be lists; a multiple choice has "choices": [..] and letters as answers.
      options: model and decoding.
      task: published settings: chartqa, docvqa, infovqa, multiple-choice or word. They are length, block and
        steps, unless --length is given, and the four options below as far as those are not given. None: the
        question as it is, exact match, and --length is needed.
      metric: relaxed (ChartQA), anls (DocVQA), exact, or letter of a choice.
      template: of the user's text, with {question}, and {choices} where there are any.
      stop: texts that end an answer.
      behind: only what stands behind the last of these in an answer counts.
      limit: only the first questions.
      drop_first_id: as the released code, leave out the first id behind an image, unlike in training.
      newline: end each of several images with a newline, as in training; the released evaluation does not.
      exif: turn images as their EXIF orientation says; the released code does not.
      at_once: views that the tower takes in one program, which bounds its memory.
    """
    # The published way of the task, changed by whatever is given beside it.
    given = {"metric": metric, "template": template, "stop": stop, "behind": behind}
    kind = ImageTask() if task is None else published(task)
    kind = dataclasses.replace(kind, **{name: value for name, value in given.items() if value is not None})
    samples = read(data)[: check_argument("limit", limit, PositiveInt | None)]
    options = dataclasses.replace(options, decoding=_published(options.decoding, task))

    def ready(runner: Runner) -> Runner:
        own = dict(tokenizer=runner.lm.tokenizer, several=Pad(newline), drop_first_id=drop_first_id)
        processor = Processor.load(options.checkpoint.path, **own, exif=exif, at_once=at_once)
        return runner.with_images(processor)

    # Whatever of a processor's options changes an answer is in the record.
    settings = dataclasses.asdict(kind) | {"data_sha256": sha256(data), "limit": limit}
    settings |= {"drop_first_id": drop_first_id, "newline": newline, "exif": exif}
    ask = lambda runner: requests(runner, kind, samples)
    return options.evaluate("images", settings, ask, ready=ready)


def _published(decoding: Decoding, task: str | None) -> Decoding:
    """The settings with the published length, block and steps, unless they have a length."""
    # Published blocks and steps are of the published length: another length goes without them.
    if task is None or decoding.length is not None:
        return decoding
    recipe = presets.recipe(FAMILY, task)
    names = [name for name in ("length", "block", "steps") if getattr(decoding, name) is None]
    return dataclasses.replace(decoding, **{name: getattr(recipe, name) for name in names})
