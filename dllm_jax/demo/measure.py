"""Answers the same held-out prompts under several policies and samplers, and measures each."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int

from dllm_jax.decoding.chat import decode_answers
from dllm_jax.decoding.compare import compare
from dllm_jax.decoding.output import Output
from dllm_jax.nn.model import Model
from dllm_jax.policies import Policy
from dllm_jax.published.expressions import call
from dllm_jax.samplers import Sampler
from dllm_jax.tasks import Example, exact, prompt_arrays


@dataclasses.dataclass(frozen=True)
class Questions:
    """Held-out prompts as arrays.

    Attributes:
      examples: the questions and their answers.
      prompt: int32 [b p], left-padded.
      mask: bool [b p], False at padding.
    """

    examples: list[Example]
    prompt: Int[np.ndarray, "b p"]
    mask: Bool[np.ndarray, "b p"]

    @classmethod
    def of(cls, tokenizer: Any, examples: list[Example], pad_id: int) -> "Questions":
        """The examples as one left-padded batch."""
        prompt, mask = prompt_arrays(tokenizer, examples, pad_id)
        return cls(examples, prompt, mask)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the demonstration's table.

    Attributes:
      policy: its constructor call.
      sampler: its constructor call.
      accuracy: fraction of exactly right answers.
      forwards: network passes per prompt.
      computed: positions that pass through the network per answer token (tokens before end-of-text).
      tokens_per_second: answer tokens of the batch over the median time of a run, compilation excluded.
      speed_up: tokens per second relative to the first row's.
      compile_seconds: time of tracing and compiling.
    """

    policy: str
    sampler: str
    accuracy: float
    forwards: float
    computed: float
    tokens_per_second: float
    speed_up: float
    compile_seconds: float


def measure(
    model: Model,
    tokenizer: Any,
    questions: Questions,
    grid: list[tuple[Policy, Sampler]],
    repeats: int = 3,
    **options: Any,
) -> list[Row]:
    """Measures each (policy, sampler); timed runs of all of them are interleaved, `repeats` times.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      questions: the prompts and their answers.
      grid: what to compare; speed-ups are over the first.
      repeats: timed runs of each, of which the median counts.
      **options: length, block and steps of `generate`.
    """

    runs = {f"{p!r} {s!r}": {"policy": p, "sampler": s} for p, s in grid}
    found = compare(
        model, questions.prompt, runs, prompt_mask=questions.mask, repeats=repeats, **options
    ).rows
    rates = [float(np.sum(row.output.stats.answer)) / row.seconds for row in found]
    return [
        Row(
            policy=repr(policy),
            sampler=call(sampler, always=("threshold",)),
            accuracy=_accuracy(model, tokenizer, questions, row.output),
            forwards=row.nfe,
            computed=float(np.sum(row.output.stats.computed) / max(np.sum(row.output.stats.answer), 1)),
            tokens_per_second=rate,
            speed_up=rate / rates[0],
            compile_seconds=row.compile_seconds,
        )
        for (policy, sampler), row, rate in zip(grid, found, rates, strict=True)
    ]


def _accuracy(model: Model, tokenizer: Any, questions: Questions, out: Output) -> float:
    responses: Int[Array, "b r"] = out.tokens[:, questions.prompt.shape[1] :]
    answers = decode_answers(model, tokenizer, np.asarray(responses))
    return float(np.mean(exact(answers, questions.examples)))
