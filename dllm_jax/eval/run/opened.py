"""A checkpoint opened for evaluation: model, tokenizer, and the hash that identifies it in records."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dllm_jax import embedded
from dllm_jax.checkpoint import load
from dllm_jax.checkpoint.files import read_tokenizer
from dllm_jax.checkpoint.source import locate
from dllm_jax.eval.results.record import fingerprint
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.nn.model import Model


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model and its tokenizer.

    Attributes:
      name: as given to `open_model`.
      model: see `load`.
      tokenizer: from transformers.
      identity: hash of the checkpoint's files, dtype and rope factor: all that answers depend on besides
        settings and prompt.
    """

    name: str
    model: Model
    tokenizer: Any
    identity: str

    def runner(
        self, decoding: Decoding, batch: int, bucket: int, max_positions: int | None, progress: bool
    ) -> Runner:
        """A runner of this model; arguments as in `Runner`."""
        return Runner(
            self.model, self.tokenizer, decoding, self.identity, batch, bucket, max_positions, progress
        )


def open_model(
    name: str, dtype: str | None = None, rope_factor: float = 1.0, tokenizer: str | None = None
) -> OpenedModel:
    """Opens an embedded model, a checkpoint directory or a hub id.

    Args:
      name: of the model.
      dtype: None keeps the checkpoint's.
      rope_factor: multiplies the rotary base.
      tokenizer: directory or hub id of the tokenizer, if not the model's own.

    Raises:
      FileNotFoundError: there is no such model.
      ValueError: `load` refuses it.
    """
    path = embedded.path(name) if name in embedded.NAMES and not Path(name).is_dir() else locate(name)
    model = load(path, dtype=None if dtype is None else jnp.dtype(dtype), rope_factor=rope_factor)
    identity = f"sha256:{fingerprint(path)} {model.dtype} rope_factor={rope_factor:g}"
    read = read_tokenizer(path if tokenizer is None else locate(tokenizer))
    return OpenedModel(name, model, read, identity)
