"""The mask token of checkpoints whose config.json does not name it: their tokenizer files do."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dllm_jax.checkpoint.config import Config, MaskTokenWarning
from dllm_jax.checkpoint.files import has_entry, read_object
from dllm_jax.options import PositiveInt

ADDED, SETTINGS, TOKENIZER = "added_tokens.json", "tokenizer_config.json", "tokenizer.json"


def with_a_mask(config: Config, token: str, published: Mapping[int, int]) -> Config:
    """A config.json that names the mask token.

    It is the id that config.json or generation_config.json names, else that of the token in the tokenizer's
    files. Without either, the published id of its vocabulary stands in for it, or the last id that ends no
    response.

    Args:
      config: A config.json.
      token: Text of the mask token.
      published: Ids of the mask token, by the vocabulary size of published models.

    Warns:
      MaskTokenWarning: no file names the token.
    """
    named = (values.get("mask_token_id") for values in (config.values, config.generation))
    if any(mask is not None for mask in named):
        return config
    mask = None if config.folder is None else added_token(config.folder, token)
    if mask is None:
        mask = published.get(vocab := config.read("vocab_size", PositiveInt)) or _last(config, vocab)
        what = "the last id" if mask == vocab - 1 else "id"
        message = (
            f"{config.where} names no mask_token_id, and no tokenizer beside it {token}: {what}, {mask}, "
        )
        message += "stands in for it; model.replace_spec(mask_id=...) sets another"
        warnings.warn(message, MaskTokenWarning, stacklevel=2)
    return dataclasses.replace(config, values=config.values | {"mask_token_id": mask})


def added_token(folder: Path, token: str) -> int | None:
    """The id of a token that a tokenizer's files add to its vocabulary; None if they do not.

    Raises:
      ValueError: one of the files is no JSON object.
    """
    # tokenizer.json is large, and names tokens only where the other files do not.
    readers = {ADDED: dict, SETTINGS: _by_id, TOKENIZER: _listed}
    for name, reader in readers.items():
        if has_entry(folder, name) and type(found := reader(read_object(folder / name)).get(token)) is int:
            return found
    return None


def _by_id(values: dict[str, Any]) -> dict[Any, Any]:
    added = values.get("added_tokens_decoder")
    entries = added.items() if isinstance(added, dict) else ()
    found = {e["content"]: i for i, e in entries if isinstance(e, dict) and isinstance(e.get("content"), str)}
    return {text: int(number) for text, number in found.items() if number.isdecimal()}


def _listed(values: dict[str, Any]) -> dict[Any, Any]:
    added = values.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return {e["content"]: e.get("id") for e in entries if isinstance(e.get("content"), str)}


def _last(config: Config, vocab: int) -> int:
    """The last id of the vocabulary that is no end of a response."""
    ends = {*config.end_ids(config.values), *config.end_ids(config.generation)}
    return next((i for i in range(vocab - 1, -1, -1) if i not in ends), vocab - 1)
