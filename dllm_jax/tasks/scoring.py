"""How often a model answers exactly, through the public decoder."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from dllm_jax.decoding.chat import decode_answers
from dllm_jax.decoding.generate import generate
from dllm_jax.nn.model import Model
from dllm_jax.tasks.base import Example, exact
from dllm_jax.tasks.encoding import prompt_arrays


def answers(model: Model, tokenizer: Any, examples: list[Example], batch: int = 64, **options) -> list[str]:
    """The model's answers.

    Args:
      model: the model.
      tokenizer: its tokenizer, with a chat template.
      examples: the questions; those of a chunk are left-padded to a common length.
      batch: examples decoded at a time.
      **options: passed on to `generate` (length, block, steps, policy, sampler, ...).
    """
    out = []
    for start in range(0, len(examples), batch):
        prompt, mask = prompt_arrays(tokenizer, examples[start : start + batch], model.spec.eos_id)
        tokens = generate(model, jnp.asarray(prompt), prompt_mask=jnp.asarray(mask), **options).tokens
        out += decode_answers(model, tokenizer, np.asarray(tokens)[:, prompt.shape[1] :])
    return out


def accuracy(model: Model, tokenizer: Any, examples: list[Example], batch: int = 64, **options) -> float:
    """Share of exactly right answers, in [0, 1]; arguments as in `answers`."""
    return float(np.mean(exact(answers(model, tokenizer, examples, batch, **options), examples)))
