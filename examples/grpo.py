"""Group relative policy optimization with diffu-GRPO's estimator, and rollouts under a cache policy.

    python examples/grpo.py --out bench/results/learning_grpo_cpu.json

The task is to stop after two look-ups of a chain, the reward 1 for the right answer. Responses are sampled by
`dj.generate_many` under DualCache; the policy gradient is that of the exact model. The reference is the model
without its adapters.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.command_line import run
from dllm_jax.decoding.stops import decode_answers
from dllm_jax.tasks import exact, prompt_arrays
from dllm_jax.training import (
    Batch,
    Masks,
    group_advantages,
    grpo_loss,
    one_step_masks,
    response_log_probs,
    until_end,
)

if not __package__:  # run as a file: `examples` is its folder
    sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.learning import LENGTH, Curve, adam, adapted, drawn, held_out, learner, pretrained, updating


def rollouts(
    model: dj.Model, tokenizer: Any, step: int, prompts: int, group: int, temperature: float
) -> tuple[Batch, np.ndarray]:
    """`group` sampled responses to each prompt, next to each other, and their rewards."""
    questions = [question for question in drawn(step, prompts) for _ in range(group)]
    prompt, mask = prompt_arrays(tokenizer, questions, model.spec)
    keys = jax.random.split(jax.random.key(step), len(questions))
    asked = ({"prompt": row[real], "key": key} for row, real, key in zip(prompt, mask, keys, strict=True))
    answer = np.zeros((len(questions), LENGTH), np.int32)
    for index, sampled in dj.generate_many(
        model,
        asked,
        slots=min(len(questions), 32),
        length=LENGTH,
        policy=dj.policies.DualCache(),
        sampler=dj.samplers.Confidence(temperature=temperature),
    ):
        assert isinstance(sampled, dj.Output), "errors are raised"
        answer[index] = sampled.tokens[0, -LENGTH:]
    right = exact(decode_answers(model, tokenizer, answer), questions)
    batch = Batch(jnp.asarray(prompt), jnp.asarray(answer), jnp.asarray(mask))
    return batch, np.asarray(right, np.float32)


def main(
    model: str = "tiny-llada",
    steps: int = 15,
    prompts: int = 16,
    group: int = 8,
    updates: int = 2,
    rank: int = 8,
    learning_rate: float = 3e-4,
    temperature: float = 1.0,
    kl: float = 0.02,
    review_every: int = 3,
    questions: int = 128,
    out: Path | None = None,
) -> Curve:
    """Trains and prints the curve.

    Args:
      model: Name of a bundled model.
      steps: Number of batches of rollouts.
      prompts: Number of questions per step.
      group: Number of responses to each question.
      updates: Number of gradient steps per batch of rollouts, each with its own prompt masks.
      rank: Rank of the adapters.
      learning_rate: Constant learning rate of Adam.
      temperature: Temperature of the sampler.
      kl: Weight of the divergence from the reference.
      review_every: Number of steps between measurements of accuracy.
      questions: Number of held-out questions that measure accuracy.
      out: JSON file of the curve.
    """
    base, tokenizer = pretrained(model)
    optimizer = adam(learning_rate)
    state = learner(adapted(base, rank), optimizer)

    def objective(policy: dj.Model, old: dj.Model, batch: Batch, masks: Masks, advantage: jax.Array):
        estimate = lambda each: response_log_probs(each, batch, masks)
        counted = until_end(batch.answer, base.spec.eos_id, base.spec.eot_id)
        reference = estimate(lora.detach(policy)) if kl else None
        return grpo_loss(
            estimate(policy), estimate(old), advantage, counted=counted, reference=reference, kl=kl
        )

    update = updating(objective, optimizer)
    curve = Curve(
        out,
        model=model,
        prompts=prompts,
        group=group,
        updates=updates,
        rank=rank,
        learning_rate=learning_rate,
        temperature=temperature,
        kl=kl,
    )
    curve.add(0, accuracy=held_out(state.model, tokenizer, questions))
    rewards: list[float] = []
    for step in range(1, steps + 1):
        batch, reward = rollouts(state.model, tokenizer, step, prompts, group, temperature)
        rewards.append(float(reward.mean()))
        old, advantage = state.model, group_advantages(reward, group)
        for key in jax.random.split(jax.random.fold_in(jax.random.key(1), step), updates):
            state, metrics = update(state, old, batch, one_step_masks(key, batch), advantage)
        if step % review_every == 0 or step == steps:
            reached = held_out(state.model, tokenizer, questions)
            curve.add(step, accuracy=reached, reward=np.mean(rewards), kl=metrics.kl, clipped=metrics.clipped)
            rewards = []
    return curve


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
