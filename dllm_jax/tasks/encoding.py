"""Examples as token arrays, in the prompt format that `dllm_jax.chat` uses."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from dllm_jax.decoding.chat import encode_chats
from dllm_jax.tasks.base import Example
from dllm_jax.training.loss import Batch


def prompt_arrays(tokenizer: Any, examples: list[Example], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Chat-templated prompts: ids int32 [b p], left-padded, and their mask bool [b p]."""
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    ids, mask = encode_chats(tokenizer, chats, pad_id)
    return np.asarray(ids), np.asarray(mask)


def encode_batch(tokenizer: Any, examples: list[Example], length: int, eos_id: int, eot_id: int) -> Batch:
    """A training batch: each answer ends with `eot_id`, then end-of-text up to `length`, all of it learnt.

    Args:
      tokenizer: from transformers, with a chat template.
      examples: the questions.
      length: response positions.
      eos_id: pads prompts (masked out) and answers (learnt).
      eot_id: ends the turn.

    Raises:
      ValueError: an answer that does not fit.
    """
    prompt, mask = prompt_arrays(tokenizer, examples, eos_id)
    answers = np.full((len(examples), length), eos_id, np.int32)
    for row, example in zip(answers, examples, strict=True):
        ids = [*tokenizer.encode(example.answer, add_special_tokens=False), eot_id]
        if len(ids) > length:
            raise ValueError(f"length={length}: {example.answer!r} needs {len(ids)} tokens with its end")
        row[: len(ids)] = ids
    return Batch(jnp.asarray(prompt), jnp.asarray(answers), None if mask.all() else jnp.asarray(mask))
