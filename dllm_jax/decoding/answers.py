"""Texts of answers, which end at the first end-of-text, end-of-turn or stop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from dllm_jax.decoding.stops import StopTexts
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument, shown
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray
from dllm_jax.state.text import check_members, decode


def decode_answers(
    model: Model,
    tokenizer: Any,
    responses: Int[AnyArray, "b r"] | Sequence[Sequence[int]],
    stops: StopTexts | None = None,
) -> list[str]:
    """Decodes each response to the text up to its first end-of-text, end-of-turn or other stop id.

    A tokenizer's `decode` with `skip_special_tokens=True` also returns the text after the end of the answer.

    Args:
      model: Model that generated the responses.
      tokenizer: Tokenizer of the checkpoint.
      responses: Token ids [b, r] of the responses without their prompts, such as `out.tokens[:, -length:]`.
      stops: Stop texts of the generation, at which texts end too. Default: none.

    Returns:
      The text of each response, without special tokens.

    Raises:
      ValueError: Responses that are not a batch of the model's token ids, or another invalid argument.

    Examples:
      >>> path = dj.bundled.path("tiny-llada")
      >>> model, tokenizer = dj.load(path), dj.load_tokenizer(path)
      >>> question = [{"role": "user", "content": "aob=407;T=211;iez=830;T="}]
      >>> ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
      >>> out = dj.generate(model, [ids["input_ids"]], length=8, block=4)
      >>> dj.decode_answers(model, tokenizer, out.tokens[:, -8:])
      ['211']
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_members(tokenizer, "decode")
    check_argument("stops", stops, StopTexts | None, ", such as dj.StopTexts(tokenizer, ['\\n'])")
    rows = _rows(responses, model.spec.vocab)
    cut = [before_end(model, ids) for ids in rows]
    if stops is not None:
        return [stops.decode(ids) for ids in cut]
    return [decode(tokenizer, ids.tolist()) for ids in cut]


def _rows(responses: Any, vocab: int) -> list[Int[np.ndarray, "r"]]:
    """The token ids of each response."""
    rule = f"responses={shown(responses)} must be a batch of token ids below {vocab}, such as "
    rule += "out.tokens[:, -length:]"
    given = host.everywhere(responses) if isinstance(responses, AnyArray) else responses
    if not isinstance(given, np.ndarray | Sequence) or isinstance(given, str | bytes):
        raise ValueError(rule)
    rows = [host.array("responses", row, "token ids") for row in given]
    for row in rows:
        whole = np.ndim(row) == 1 and (np.issubdtype(row.dtype, np.integer) or not row.size)
        if not whole or (row.size and not 0 <= np.min(row) <= np.max(row) < vocab):
            raise ValueError(rule)
    return [np.asarray(row) for row in rows]


def before_end(model: Model, ids: Int[np.ndarray, "r"]) -> Int[np.ndarray, "n"]:
    """The tokens of a response in front of its first end-of-text, end-of-turn or other stop id."""
    # Whichever comes first; of some models no end-of-turn is known.
    ends = [i for i in (*model.spec.ends, model.spec.eot_id) if i is not None]
    return ids[: np.argmax(hit)] if (hit := np.isin(ids, ends)).any() else ids
