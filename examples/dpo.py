"""Preference optimization (VRPO's estimator): right answers are preferred to wrong ones.

    python examples/dpo.py --out bench/results/learning_dpo_cpu.json

The task is to stop after two look-ups of a chain. A pair is the right answer and one that goes on for a
third; the reference is the model without its adapters, so it costs no memory. Preferences alone keep the
pair apart but may make both unlikely, so right answers are also learnt as such, by `supervised`.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import tyro

from dllm_jax import lora
from dllm_jax.command_line import run
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.tasks import Example
from dllm_jax.training import Batch, vrpo_loss

if not __package__:  # run as a file: `examples` is its folder
    sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.learning import Curve, adam, adapted, drawn, encoded, held_out, learner, pretrained, updating


def pairs(tokenizer: Any, spec: ModelSpec, step: int, count: int) -> tuple[Batch, Batch]:
    """Prompts with their right answers, and the same prompts with wrong ones."""
    right = drawn(step, count)

    def wrong(example: Example) -> Example:
        known = dict(link.split(">") for link in example.prompt.split(";")[:-1])
        last = example.answer[-2]
        return Example(example.prompt, f"{example.answer}{last}>{known[last]}")

    return encoded(tokenizer, spec, right), encoded(tokenizer, spec, [wrong(example) for example in right])


def main(
    model: str = "tiny-llada",
    steps: int = 40,
    batch: int = 16,
    rank: int = 8,
    learning_rate: float = 1e-3,
    beta: float = 0.1,
    supervised: float = 1.0,
    draws: int = 2,
    review_every: int = 10,
    questions: int = 128,
    out: Path | None = None,
) -> Curve:
    """Trains and prints the curve.

    Args:
      model: Name of a bundled model.
      steps: Number of optimizer steps.
      batch: Number of preference pairs per step.
      rank: Rank of the adapters.
      learning_rate: Constant learning rate of Adam.
      beta: Strength beta of DPO.
      supervised: Weight of the right answers' likelihood; 0 is pure DPO.
      draws: Number of noise levels and masks per response.
      review_every: Number of steps between measurements of accuracy.
      questions: Number of held-out questions that measure accuracy.
      out: JSON file of the curve.
    """
    base, tokenizer = pretrained(model)
    optimizer = adam(learning_rate)
    state = learner(adapted(base, rank), optimizer)
    objective = lambda policy, chosen, rejected, key: vrpo_loss(
        policy, lora.detach(policy), chosen, rejected, key,
        beta=beta, supervised=supervised, draws=draws, chunk=draws,
    )  # fmt: skip
    update = updating(objective, optimizer)
    options = dict(learning_rate=learning_rate, beta=beta, supervised=supervised, draws=draws)
    curve = Curve(out, model=model, batch=batch, rank=rank, **options)
    curve.add(0, accuracy=held_out(state.model, tokenizer, questions))
    for step in range(1, steps + 1):
        chosen, rejected = pairs(tokenizer, base.spec, step, batch)
        state, metrics = update(state, chosen, rejected, jax.random.key(step))
        if step % review_every == 0 or step == steps:
            reached = held_out(state.model, tokenizer, questions)
            of_pairs = dict(loss=metrics.loss, margin=metrics.margin, preferred=metrics.accuracy)
            curve.add(step, accuracy=reached, **of_pairs)
    return curve


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
