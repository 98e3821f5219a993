"""Token ids at which blocks may end (`AdaBlock`), found in a tokenizer."""

from collections.abc import Iterable
from typing import Any

from dllm_jax.options import shown


def delimiters(tokenizer: Any, texts: Iterable[str] = ("\n",)) -> tuple[int, ...]:
    """Finds the tokens whose text ends with one of the delimiters, for `AdaBlock(delimiters=...)`.

    `("\\n", ".", ",")` are the authors' ends of lines, sentences and clauses. Special tokens are never found.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      texts: Delimiters.

    Returns:
      their ids, ascending.

    Raises:
      ValueError: no texts, an empty one, or no token that ends with one.
    """
    ends = () if isinstance(texts, str) or not isinstance(texts, Iterable) else tuple(texts)
    if not ends or not all(isinstance(end, str) and end for end in ends):
        raise ValueError(f'texts={shown(texts)} must be a list of texts, none of them empty, such as ["\\n"]')
    each = [[i] for i in range(len(tokenizer))]
    options = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
    found = (text.endswith(ends) for text in tokenizer.batch_decode(each, **options))
    ids = tuple(i for i, hit in enumerate(found) if hit)
    if not ids:
        raise ValueError(
            f"texts={shown(texts)}: no token of the vocabulary ends with one of them. Use others."
        )
    return ids
