"""A source of batches that grows with the model: the next stage comes when the current one is mastered."""

import dataclasses
from typing import Any

import numpy as np

from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.tasks.base import Task, examples
from dllm_jax.tasks.encoding import encode_batch
from dllm_jax.tasks.scoring import accuracy
from dllm_jax.training.loss import T_MIN, Batch
from dllm_jax.training.source import Memory

REVIEW = 1 << 32  # seeds of reviews are (seed, REVIEW + step): never those of a training batch


@dataclasses.dataclass(frozen=True)
class Stage:
    """One level of difficulty.

    Attributes:
      task: where examples come from.
      size: their size, see the task.
      batch: examples per step.
      length: response positions; at least the task's `answer_length` + 1.
      t_min: smallest noise level, see `Batch`.
      bar: accuracy that ends the stage.
      weight: its share of rehearsal, among the stages so far.
    """

    task: Task
    size: int
    batch: int
    length: int
    t_min: float = T_MIN
    bar: float = 0.9
    weight: float = 1.0

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError(f"batch={self.batch} must be at least 1")
        if not 0 < self.t_min <= 1:
            raise ValueError(f"t_min={self.t_min} must lie in (0, 1]")
        if not 0 <= self.bar <= 1:
            raise ValueError(f"bar={self.bar} must lie in [0, 1]")
        if self.weight <= 0:
            raise ValueError(f"weight={self.weight} must be positive")
        most = self.task.answer_length(self.size)
        if self.length <= most:
            raise ValueError(f"length={self.length} must exceed {self.task.name}'s longest answer, {most}")


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Stages in order of difficulty; a `dllm_jax.training.Source`.

    A model that starts at the hardest stage never leaves the guessing floor of key-value recall; one that
    starts at two pairs needs few steps for each stage after the first. When accuracy on fresh examples of
    the current stage passes its bar, the next begins; earlier stages are rehearsed. When all are mastered,
    every batch is rehearsal.

    Attributes:
      stages: easiest first.
      tokenizer: from transformers, with a chat template.
      spec: of the model that is trained; its token ids end and pad the answers.
      seed: of the examples.
      rehearsal: share of batches drawn from any of the stages so far, the current one included, by weight.
      review_examples: examples per review.
    """

    stages: tuple[Stage, ...]
    tokenizer: Any
    spec: ModelSpec
    seed: int = 0
    rehearsal: float = 0.3
    review_examples: int = 64

    def __post_init__(self):
        if not self.stages:
            raise ValueError("stages=(): a curriculum needs at least one")
        if not 0 <= self.rehearsal <= 1:
            raise ValueError(f"rehearsal={self.rehearsal} must lie in [0, 1]")
        if self.review_examples < 1:
            raise ValueError(f"review_examples={self.review_examples} must be at least 1")
        if self.spec.eot_id is None:
            raise ValueError("spec.eot_id=None: answers must end with an end-of-turn token")

    def begin(self) -> Memory:
        """The first stage; `accuracy` is that of the last review."""
        return {"stage": 0, "accuracy": 0.0}

    def batch(self, memory: Memory, step: int) -> Batch:
        """Training examples of one stage."""
        rng = np.random.default_rng((self.seed, step))
        current = memory["stage"]
        if current == len(self.stages) or rng.random() < self.rehearsal:
            weights = np.array([stage.weight for stage in self.stages[: current + 1]])
            current = int(rng.choice(len(weights), p=weights / weights.sum()))
        stage = self.stages[current]
        drawn_examples = examples(stage.task, (self.seed, step), stage.size, stage.batch, "train")
        batch = encode_batch(
            self.tokenizer, drawn_examples, stage.length, self.spec.eos_id, self.spec.eot_id or 0
        )
        return batch._replace(t_min=stage.t_min)

    def review(self, memory: Memory, model: Model, step: int) -> Memory:
        """Scores the current stage on fresh examples, one token per step, and moves on if it is mastered.

        Decoding everything in one step would be cheaper but judges another ability: at six pairs a model
        that answers 93 % token by token gets 64 % in one step, and would be held back for nothing.
        """
        if memory["stage"] == len(self.stages):
            return memory
        stage = self.stages[memory["stage"]]
        fresh = examples(stage.task, (self.seed, REVIEW + step), stage.size, self.review_examples, "train")
        score = accuracy(model, self.tokenizer, fresh, self.review_examples, length=stage.length)
        return {"stage": memory["stage"] + int(score >= stage.bar), "accuracy": score}
