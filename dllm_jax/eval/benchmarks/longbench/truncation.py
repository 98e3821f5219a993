"""LongBench's truncation: a prompt that is too long loses its middle, since questions stand at either end.

Published lengths (max_length in config/model2maxlen.json of github.com/THUDM/LongBench) are 3500, 7500, 15500
and 31500 tokens: the model's window less 500 to 1000.
"""

from typing import Any


def truncate(text: str, tokenizer: Any, truncate_to: int) -> str:
    """The text without its middle, about `truncate_to` tokens long (the paper's max_length).

    The first and the last int(truncate_to / 2) tokens are decoded separately, without special tokens, and
    joined; as published, the result may be a few tokens longer or shorter.

    Raises:
      ValueError: truncate_to below 2.
    """
    if truncate_to < 2:
        raise ValueError(f"truncate_to={truncate_to} must be at least 2")
    ids = tokenizer(text)["input_ids"]
    if len(ids) <= truncate_to:
        return text
    half = truncate_to // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
