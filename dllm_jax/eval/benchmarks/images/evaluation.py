"""Evaluates a model on questions about images."""

from collections.abc import Sequence

from dllm_jax.eval.benchmarks.images.data import Sample
from dllm_jax.eval.benchmarks.images.tasks import ImageTask
from dllm_jax.eval.results.record import scored
from dllm_jax.eval.results.schema import Row
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.pictured import PicturedRunner


def evaluate(
    runner: PicturedRunner, task: ImageTask, samples: Sequence[Sample], journal: Journal | None = None
) -> list[Row]:
    """Rows of a record, in one group.

    Args:
      runner: the model with its settings, which have a length.
      task: how questions are put and scored.
      samples: the questions.
      journal: of an earlier run, to resume from.

    Raises:
      ValueError: settings without a length; an image that cannot be decoded, a question that does not suit
        the task, or a prompt that is too long: all are found before anything is decoded, with file and line.
    """
    length = runner.decoding.length
    if length is None:
        raise ValueError("the response's length is not known: give --length, or a published task")
    requests = []
    for sample in samples:
        text, images = task.text(sample), [str(path) for path in sample.images]
        try:
            requests.append(runner.request(sample.id, text, images, length, task.stop, task.name))
        except ValueError as error:
            raise ValueError(f"{sample.where}: {error}") from None
    entries = runner.run(requests, journal)
    scores = [
        0.0 if entry["answer"] is None else task.score(entry["answer"], sample)
        for sample, entry in zip(samples, entries, strict=True)
    ]
    return scored(requests, entries, scores, [sample.answers for sample in samples])
