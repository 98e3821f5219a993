"""Supervised fine-tuning with LoRA: an embedded model learns to put letters in order.

    python -m examples.sft_lora --out bench/results/learning_sft_cpu.json

The loss is LLaDA's, the trained parameters are the adapters alone, and `dllm_jax.training.train` does the
rest; the adapters end up in Hugging Face PEFT's files.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import tyro
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.tasks import Sorting, encode_batch
from dllm_jax.training import Batch, Memory, Source, TrainConfig, train
from examples.learning import Curve, drawn, held_out, pretrained

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Lesson(Source):
    """Examples of sorting, and the accuracy on held-out ones at every review."""

    tokenizer: Any
    spec: dj.ModelSpec
    curve: Curve
    letters: int
    batch_size: int
    questions: int

    @override
    def begin(self) -> Memory:
        return {"accuracy": 0.0}

    @override
    def batch(self, memory: Memory, step: int) -> Batch:
        questions = drawn(step, self.batch_size, Sorting(), self.letters)
        return encode_batch(
            self.tokenizer, questions, self.letters + 1, self.spec.eos_id, self.spec.eot_id or 0
        )

    @override
    def review(self, memory: Memory, model: dj.Model, step: int) -> Memory:
        sizes = dict(task=Sorting(), size=self.letters, length=self.letters + 1)
        reached = held_out(model, self.tokenizer, self.questions, **sizes)
        self.curve.add(step, accuracy=reached)
        return {"accuracy": reached}


def main(
    model: str = "tiny-llada",
    letters: int = 5,
    steps: int = 300,
    batch: int = 64,
    rank: int = 16,
    learning_rate: float = 4e-3,
    review_every: int = 50,
    questions: int = 128,
    adapter: Path | None = None,
    out: Path | None = None,
) -> Curve:
    """Trains and prints the curve.

    Args:
      model: an embedded one.
      letters: to put in order.
      steps: of the optimiser.
      batch: examples per step.
      rank: of the adapters.
      learning_rate: the peak.
      review_every: steps between measurements of accuracy.
      questions: held-out ones to measure it on.
      adapter: where to write the adapters, as PEFT does.
      out: JSON file of the curve.
    """
    base, tokenizer = pretrained(model)
    options = lora.LoRA(rank=rank, alpha=2.0 * rank, matrices=MATRICES)
    adapted = lora.attach(base, options, jax.random.key(0))
    curve = Curve(out, model=model, letters=letters, batch=batch, rank=rank, learning_rate=learning_rate)
    lesson = Lesson(tokenizer, base.spec, curve, letters, batch, questions)
    lesson.review({}, adapted, 0)
    config = TrainConfig(
        steps=steps,
        learning_rate=learning_rate,
        decay=steps // 3,
        weight_decay=0.0,
        review_every=review_every,
        save_every=review_every,
    )
    run = train(adapted, lesson, config, trainable=lora.trainable, progress=False)
    if adapter is not None:
        lora.save(run.model, adapter, base=model, overwrite=True)
    return curve


if __name__ == "__main__":
    tyro.cli(main)
