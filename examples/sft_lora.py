"""Supervised fine-tuning with LoRA: a bundled model learns to stop after two look-ups of a chain.

    python examples/sft_lora.py --out bench/results/learning_sft_cpu.json

The loss is LLaDA's, the trained parameters are the adapters alone, and `dllm_jax.training.train` does the
rest; the adapters end up in Hugging Face PEFT's files.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import tyro
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.command_line import run
from dllm_jax.training import Batch, Memory, Source, TrainConfig, train

if not __package__:  # run as a file: `examples` is its folder
    sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.learning import Curve, adapted, drawn, encoded, held_out, pretrained


@dataclasses.dataclass(frozen=True)
class Lesson(Source):
    """Questions with their answers, and the accuracy on held-out ones at every review."""

    tokenizer: Any
    spec: dj.ModelSpec
    curve: Curve
    batch_size: int
    questions: int

    @override
    def begin(self) -> Memory:
        return {"accuracy": 0.0}

    @override
    def batch(self, memory: Memory, step: int) -> Batch:
        return encoded(self.tokenizer, self.spec, drawn(step, self.batch_size))

    @override
    def review(self, memory: Memory, model: dj.Model, step: int) -> Memory:
        reached = held_out(model, self.tokenizer, self.questions)
        self.curve.add(step, accuracy=reached)
        return {"accuracy": reached}


def main(
    model: str = "tiny-llada",
    steps: int = 60,
    batch: int = 32,
    rank: int = 8,
    learning_rate: float = 2e-3,
    review_every: int = 10,
    questions: int = 128,
    adapter: Path | None = None,
    out: Path | None = None,
) -> Curve:
    """Trains and prints the curve.

    Args:
      model: Name of a bundled model.
      steps: Number of optimizer steps.
      batch: Number of examples per step.
      rank: Rank of the adapters.
      learning_rate: Peak learning rate.
      review_every: Number of steps between measurements of accuracy.
      questions: Number of held-out questions that measure accuracy.
      adapter: Directory to write the adapters to, in PEFT's format.
      out: JSON file of the curve.
    """
    base, tokenizer = pretrained(model)
    start = adapted(base, rank)
    curve = Curve(out, model=model, batch=batch, rank=rank, learning_rate=learning_rate)
    lesson = Lesson(tokenizer, base.spec, curve, batch, questions)
    lesson.review({}, start, 0)
    config = TrainConfig(
        steps=steps,
        learning_rate=learning_rate,
        decay=steps // 3,
        weight_decay=0.0,
        review_every=review_every,
        save_every=review_every,
    )
    run = train(start, lesson, config, trainable=lora.trainable, progress=False)
    if adapter is not None:
        lora.save(run.model, adapter, base=model, overwrite=True)
    return curve


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
