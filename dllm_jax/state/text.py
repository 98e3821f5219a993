"""Text as token ids, in which special tokens are recognised or plain text."""

import re
from typing import Any

from dllm_jax.options import shown

# Private-use characters around text in which special tokens are not recognised.
MARKS = "\ue000\ue001", "\ue001\ue000"


def mark_plain(tokenizer: Any, text: str) -> str:
    """Puts `MARKS` around a text that spells a special token, such as the mask's, inside of its spaces."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    inner = text.strip()
    if not any(token in text for token in special):
        return text
    return text.replace(inner, inner.join(MARKS))


def encode_marked(tokenizer: Any, text: str) -> list[int]:
    """Encodes a text: special tokens are recognised, but not between `MARKS`, where they are plain text."""
    ids: list[int] = []
    for i, piece in enumerate(re.split("|".join(MARKS), text)):
        plain = i % 2 == 1
        ids += encode_plain(tokenizer, piece) if plain else tokenizer.encode(piece, add_special_tokens=False)
    return ids


def encode_plain(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Encodes a text in which special tokens are plain text.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      text: Text to encode.
      add_special_tokens: Whether the tokenizer adds its own special tokens, such as beginning-of-text.

    Raises:
      ValueError: the tokenizer cannot write them as plain text.
    """
    encode = lambda added: list(
        tokenizer(text, add_special_tokens=added, split_special_tokens=True, verbose=False)["input_ids"]
    )
    plain = encode(False)
    for id, token in tokenizer.added_tokens_decoder.items():
        if token.special and str(token) in text and id in plain:
            raise ValueError(
                f"the text {shown(text)} spells the special token {token}, which this tokenizer cannot write "
                "as plain text: say it in other words"
            )
    return encode(True) if add_special_tokens else plain
