"""Texts of answers, which end at the first end-of-text, end-of-turn or stop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from dllm_jax.decoding.stops import StopTexts
from dllm_jax.nn.model import Model
from dllm_jax.options import shown
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray
from dllm_jax.state.text import decode


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
      ValueError: Responses that are not a batch.

    Examples:
      >>> path = dj.bundled.path("tiny-llada")
      >>> model, tokenizer = dj.load(path), dj.load_tokenizer(path)
      >>> question = [{"role": "user", "content": "aob=407;T=211;iez=830;T="}]
      >>> ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
      >>> out = dj.generate(model, [ids["input_ids"]], length=8, block=4)
      >>> dj.decode_answers(model, tokenizer, out.tokens[:, -8:])
      ['211']
    """
    rows = host.everywhere(responses) if isinstance(responses, AnyArray) else [*map(np.asarray, responses)]
    if any(np.ndim(row) != 1 for row in rows):
        given = f"responses={shown(responses)} must be a batch of token ids"
        raise ValueError(f"{given}, such as out.tokens[:, -length:]")
    cut = [before_end(model, ids) for ids in rows]
    if stops is not None:
        return [stops.decode(ids) for ids in cut]
    return [decode(tokenizer, ids.tolist()) for ids in cut]


def before_end(model: Model, ids: Int[np.ndarray, "r"]) -> Int[np.ndarray, "n"]:
    """The tokens of a response in front of its first end-of-text, end-of-turn or other stop id."""
    # Whichever comes first; of some models no end-of-turn is known.
    ends = [i for i in (*model.spec.ends, model.spec.eot_id) if i is not None]
    return ids[: np.argmax(hit)] if (hit := np.isin(ids, ends)).any() else ids
