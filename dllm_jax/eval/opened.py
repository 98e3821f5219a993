"""A checkpoint ready for evaluation: model, tokenizer, and the hash that records name it by."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from transformers import AutoTokenizer

from dllm_jax import embedded
from dllm_jax.checkpoint import load
from dllm_jax.checkpoint.locate import locate
from dllm_jax.eval.record import fingerprint
from dllm_jax.model import Model


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model and its tokenizer.

    Attributes:
      name: as it was asked for.
      model: see `load`.
      tokenizer: from transformers.
      identity: hash of the checkpoint's files, dtype and rope factor: what, besides settings and prompt,
        answers depend on.
    """

    name: str
    model: Model
    tokenizer: Any
    identity: str


def open_checkpoint(
    name: str, dtype: str | None = None, rope_factor: float = 1.0, tokenizer: str | None = None
) -> Opened:
    """Opens an embedded model by name, a directory or a hub id; the tokenizer may be elsewhere.

    Raises:
      FileNotFoundError: none of them.
      ValueError: what `load` refuses.
    """
    path = embedded.path(name) if name in embedded.NAMES and not Path(name).is_dir() else locate(name)
    model = load(path, dtype=None if dtype is None else jnp.dtype(dtype), rope_factor=rope_factor)
    identity = f"sha256:{fingerprint(path)} {model.dtype} rope_factor={rope_factor:g}"
    read = AutoTokenizer.from_pretrained(path if tokenizer is None else locate(tokenizer))
    return Opened(name, model, read, identity)
