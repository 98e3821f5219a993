"""A source of batches that grows with the model: the next stage comes when the current one is mastered."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval, MinLen
from typing_extensions import override

import dllm_jax as dj
from dllm_jax.options import (
    Fraction,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    check_argument,
    shown,
)
from dllm_jax.state.text import encode_plain
from dllm_jax.tasks.base import Example, Task, accuracy, examples, prompt_arrays
from dllm_jax.training.batch import T_MIN, Batch, Memory, Source

REVIEW = 1 << 32  # seeds of reviews are (seed, REVIEW + step): never those of a training batch


@dataclasses.dataclass(frozen=True)
class Stage(Options):
    """One level of difficulty.

    Attributes:
      task: Task of the examples.
      size: their size, see the task.
      batch: examples per step.
      length: response positions; at least the task's `answer_length` + 1.
      t_min: smallest noise level, see `Batch`.
      bar: accuracy that ends the stage.
      weight: probability of the stage in rehearsal, relative to the other stages so far.
    """

    task: Task
    size: int
    batch: PositiveInt
    length: PositiveInt
    t_min: Annotated[float, Interval(gt=0, le=1)] = T_MIN
    bar: Fraction = 0.9
    weight: PositiveFloat = 1.0

    def __post_init__(self):
        super().__post_init__()
        longest = self.task.answer_length(self.size)
        if self.length <= longest:
            raise ValueError(f"length={self.length} must exceed {self.task.name}'s longest answer, {longest}")


@dataclasses.dataclass(frozen=True)
class Curriculum(Options, Source):
    """Stages in order of difficulty; a `dllm_jax.training.Source`.

    A model that starts at the hardest stage may never leave the guessing floor. When accuracy on new examples
    of the current stage reaches its bar, the next begins; earlier stages are rehearsed. When all are
    mastered, every batch is rehearsal.

    Attributes:
      stages: easiest first.
      tokenizer: Tokenizer of transformers with a chat template; a processor for stages with images.
      spec: Spec of the trained model; its token ids end and pad the answers.
      seed: Random seed of the examples.
      rehearsal: fraction of batches drawn from any of the stages so far, the current one included, by weight.
      review_examples: examples per review.
      first: the stage to begin with, for a model that has learnt those before it; len(stages) means that all
        are rehearsed from the first batch on.
      template: Variables of the chat template (`encode_batch`).
    """

    stages: Annotated[tuple[Stage, ...], MinLen(1)]
    tokenizer: Any
    spec: dj.ModelSpec
    seed: NonNegativeInt = 0
    rehearsal: Fraction = 0.3
    review_examples: PositiveInt = 64
    first: NonNegativeInt = 0
    template: Mapping[str, Any] | None = None

    def __post_init__(self):
        super().__post_init__()
        _end_of_turn(self.spec)
        if self.first > len(self.stages):
            raise ValueError(f"first={self.first} must be 0 to {len(self.stages)}, the number of stages")

    @override
    def begin(self) -> Memory:
        """The memory of the first stage; `accuracy` is that of the last review."""
        return {"stage": self.first, "accuracy": 0.0}

    @override
    def batch(self, memory: Memory, step: int) -> Batch:
        """Draws training examples of one stage."""
        rng = np.random.default_rng((self.seed, step))
        current = memory["stage"]
        # Rehearsal: some batches, and all once everything is mastered, are of any stage so far, by weight.
        if current == len(self.stages) or rng.random() < self.rehearsal:
            weights = np.array([stage.weight for stage in self.stages[: current + 1]])
            current = int(rng.choice(len(weights), p=weights / weights.sum()))
        stage = self.stages[current]
        drawn = examples(stage.task, (self.seed, step), stage.size, stage.batch, "train")
        batch = encode_batch(self.tokenizer, drawn, stage.length, self.spec, self.template)
        return batch._replace(t_min=stage.t_min)

    @override
    def review(self, memory: Memory, model: dj.Model, step: int) -> Memory:
        """Scores the current stage on new examples by `accuracy`, and moves on if it is mastered.

        Decoding everything in one step would be cheaper but judges another ability, and could hold back a
        model that answers token by token.
        """
        if memory["stage"] == len(self.stages):
            return memory
        stage = self.stages[memory["stage"]]
        # New examples of the training half: the held-out half is for the evaluation alone.
        unseen = examples(stage.task, (self.seed, REVIEW + step), stage.size, self.review_examples, "train")
        asked: dict[str, Any] = {"length": stage.length, "template": self.template}
        if not model.spec.has_mask_token:
            asked["key"] = jax.random.key(step)
        score = accuracy(model, self.tokenizer, unseen, self.review_examples, **asked)
        return {"stage": memory["stage"] + int(score >= stage.bar), "accuracy": score}


def _end_of_turn(spec: dj.ModelSpec) -> int:
    if spec.eot_id is None:
        raise ValueError("spec.eot_id=None: answers must end with an end-of-turn token")
    return spec.eot_id


def encode_batch(
    tokenizer: Any,
    examples: Sequence[Example | tuple[str, str]],
    length: int,
    spec: dj.ModelSpec,
    template: Mapping[str, Any] | None = None,
) -> Batch:
    """Encodes examples to learn: each answer, then end-of-turn, then end-of-text up to `length`.

    Prompts are those that `dllm_jax.chat` asks with the same `template`.

    Where decoding completes the last block, end-of-text goes on to its end, wherever that is: `answer_mask`
    says. Special tokens that an answer spells are plain text.

    Args:
      tokenizer: Tokenizer of transformers with a chat template; a processor for examples with images.
      examples: the questions with their answers, as `Example` or tuples of two texts.
      length: response positions.
      spec: Spec of the model, whose end-of-text pads prompts (masked out) and answers (learnt).
      template: Variables of the chat template by name. Default: enable_thinking=False of A2D models, as in
        `dllm_jax.chat`.

    Raises:
      ValueError: `template` with images, whose template is fixed; other examples, or none, an answer that
        does not fit, or a model without an end-of-turn token.
    """
    end, images = _end_of_turn(check_argument("spec", spec, dj.ModelSpec)), None
    length = check_argument("length", length, PositiveInt)
    if not isinstance(examples, Sequence) or isinstance(examples, str | bytes) or not examples:
        raise ValueError(f"examples={shown(examples)} must hold tuples (prompt, answer), at least one")
    for index, example in enumerate(examples):
        pair = isinstance(example, Example) or (isinstance(example, tuple) and len(example) == 2)
        if not pair or not all(isinstance(text, str) for text in example[:2]):
            raise ValueError(f"examples[{index}]={shown(example)} must be a tuple of texts: prompt, answer")
    examples = [each if isinstance(each, Example) else Example(each[0], each[1]) for each in examples]
    if isinstance(tokenizer, dj.vision.Processor):
        if template:
            raise ValueError(f"template={shown(template)} is not supported with images: theirs is fixed")
        prompt, mask, images = tokenizer.batch(spec, [example.messages for example in examples])
        tokenizer = tokenizer.tokenizer
    else:
        prompt, mask = prompt_arrays(tokenizer, examples, spec, template)
    # An answer, its end of turn, and end of text up to the length: where to stop is learnt too.
    size = spec.context.size if spec.context.completed else 1
    answers = np.full((len(examples), length + size - 1), spec.eos_id, np.int32)
    for answer, example in zip(answers, examples, strict=True):
        ids = [*encode_plain(tokenizer, example.answer), end]
        if len(ids) > length:
            raise ValueError(f"length={length}: {shown(example.answer)} needs {len(ids)} tokens with its end")
        answer[: len(ids)] = ids
    # Where whole blocks are decoded, end of text goes on to the end of each answer's last one.
    end_of_block = -(-(mask.sum(axis=1) + length) // size) * size - mask.sum(axis=1)
    learnt = np.arange(length + size - 1) < end_of_block[:, None]
    # Without padding there is nothing to mask.
    known, learnt = (None if real.all() else jnp.asarray(real) for real in (mask, learnt))
    return Batch(jnp.asarray(prompt), jnp.asarray(answers), known, learnt, images=images)
