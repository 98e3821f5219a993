"""How a model answers examples, through the public decoder, and how often it does so exactly."""

from typing import Any, Unpack

import numpy as np

from dllm_jax.decoding.chat import chat, encode_chats
from dllm_jax.decoding.options import AnswerOptions
from dllm_jax.nn.model import Model
from dllm_jax.tasks.base import Example, exact


def prompt_arrays(tokenizer: Any, examples: list[Example], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Encodes prompts by the chat template: ids int32 [b p], left-padded, and their mask bool [b p]."""
    ids, mask = encode_chats(tokenizer, [example.messages for example in examples], pad_id)
    return np.asarray(ids), np.asarray(mask)


def answers(
    model: Model, tokenizer: Any, examples: list[Example], batch: int = 64, **options: Unpack[AnswerOptions]
) -> list[str]:
    """Decodes the model's answers to examples.

    Args:
      model: the model.
      tokenizer: its tokenizer, with a chat template; of examples with images, its processor.
      examples: the questions; those of a chunk are left-padded to a common length.
      batch: examples decoded at a time.
      **options: passed on to `generate` (length, block, steps, policy, sampler, ...).
    """
    out = []
    for start in range(0, len(examples), batch):
        questions = [example.messages for example in examples[start : start + batch]]
        out += chat(model, tokenizer, questions, **options)
    return out


def accuracy(
    model: Model, tokenizer: Any, examples: list[Example], batch: int = 64, **options: Unpack[AnswerOptions]
) -> float:
    """Fraction of exactly right answers, in [0, 1]; the arguments are those of `answers`."""
    return float(np.mean(exact(answers(model, tokenizer, examples, batch, **options), examples)))
