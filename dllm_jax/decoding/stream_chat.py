"""A chat that is watched while it runs: the text that stays, and what may still change."""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, Unpack

import numpy as np

from dllm_jax.decoding.chat import AskedChat, Messages, prepare_chat
from dllm_jax.decoding.options import ConversationOptions, GenerateOptions, check_options, options_of, shows
from dllm_jax.decoding.stops import StopTexts, before_end, decode_answers
from dllm_jax.decoding.stream import Snapshot, stream
from dllm_jax.nn.model import Model
from dllm_jax.state.text import decode

MASK = "░"  # instead of a mask
HALF = "\ufffd"  # what a part of a character decodes to


class ChatSnapshot(NamedTuple):
    """Answers after some denoising steps; a list of each field's texts for a batch of conversations.

    Attributes:
      text: The beginning of the answer that stays as it is: later snapshots only add to it, and the last one
        has the answer of `chat`.
      draft: The answer as far as it is unmasked, with `░` for each mask. Masks are filled in any order: what
        follows `text` in it may change.
      snapshot: Tokens, steps and confidences (`Snapshot`).
    """

    text: str | list[str]
    draft: str | list[str]
    snapshot: Snapshot


@shows(options_of("stream_chat"), ConversationOptions)
def stream_chat(
    model: Model,
    tokenizer: Any,
    messages: Messages,
    *,
    every: int | None = None,
    enable_thinking: bool | None = None,
    template: Mapping[str, Any] | None = None,
    **options: Unpack[GenerateOptions],
) -> Generator[ChatSnapshot, None, None]:
    """Answers like `chat`, and yields the answer so far after every block or every few forward passes.

        for part in dj.stream_chat(model, tokenizer, messages, length=128, block=32):
            print(part.text)
        answer = part.text  # the answer of dj.chat

    Args:
      model: Model from `load`.
      tokenizer: Tokenizer or processor (`chat`).
      messages: A conversation, or a list of conversations (`chat`).
      every: Maximum number of forward passes between two snapshots (`stream`). Default: whole blocks.
      stop: Texts at which the answer ends (`chat`).
      enable_thinking: Variable of Qwen3-like chat templates (`chat`).
      template: Further variables of the chat template by name.
      sampler: Remasking strategy (`chat`).
      forbid: Ids that are never unmasked (`chat`).
      buckets: Bucket lengths for prompts (`generate`).
      **options: Options of `generate` (length, block, steps, policy, key, ...), except for `prompt_mask`,
        `prompt_embeds`, `prefix`, `logprobs` and `progress`.

    Yields:
      The answers so far.

    Raises:
      ValueError: Invalid arguments (`chat`, `stream`).
      TypeError: An option that `stream_chat` does not have.
      FileNotFoundError: There is no such file of an image.
      ImportError: A message has images, and Pillow is not installed.
      FloatingPointError: Logits held NaN or infinity, with nonfinite="raise".
    """
    check_options("stream_chat", options, "every", "enable_thinking", "template")
    asked = prepare_chat(model, tokenizer, messages, options, enable_thinking, template)
    return _parts(model, asked, stream(model, asked.prompt, every=every, **asked.options))


def _parts(
    model: Model, asked: AskedChat, snapshots: Generator[Snapshot, None, None]
) -> Generator[ChatSnapshot, None, None]:
    width = asked.prompt.shape[1]
    for snapshot in snapshots:
        responses, settled = snapshot.tokens[:, width:], snapshot.settled
        if snapshot.output is not None or settled is None:
            texts = drafts = decode_answers(model, asked.tokenizer, responses, asked.stops)
        else:
            pairs = zip(responses, settled - width, strict=True)
            texts = [_certain(model, asked, row[: max(end, 0)]) for row, end in pairs]
            drafts = [_draft(model, asked, row) for row in responses]
        text, draft = (each[0] if asked.single else each for each in (texts, drafts))
        yield ChatSnapshot(text, draft, snapshot)


def _certain(model: Model, asked: AskedChat, ids: np.ndarray) -> str:
    """The beginning of a text that no token after these changes."""
    (text,) = decode_answers(model, asked.tokenizer, ids[None], asked.stops)
    if len(before_end(model, ids)) < len(ids):
        return text
    return text[: undecided(asked.tokenizer, asked.stops, ids, len(text))]


def undecided(tokenizer: Any, stops: StopTexts | None, ids: np.ndarray, end: int) -> int:
    """The place in the text of tokens from which on it may change: a stop, or a part of a character or stop.

    Args:
      tokenizer: Tokenizer of the checkpoint.
      stops: Stop texts; None if there are none.
      ids: Tokens that stay as they are.
      end: Length of the text up to a stop that is found.
    """
    text = decode(tokenizer, ids.tolist())
    places = [end, len(text.rstrip(HALF))]
    for stop in () if stops is None else stops.texts:
        starts = range(max(0, len(text) - len(stop) + 1), len(text))
        places += [at for at in starts if stop.startswith(text[at:])][:1]
    return min(places)


def _draft(model: Model, asked: AskedChat, ids: np.ndarray) -> str:
    """The text of a response with masks shown, up to its first end."""
    ids = before_end(model, ids)
    masked = model.spec.undecided(ids)
    parts = np.split(ids, np.flatnonzero(masked[1:] != masked[:-1]) + 1)
    shown = lambda part: decode(asked.tokenizer, part.tolist())
    return "".join(MASK * len(p) if model.spec.undecided(p).all() else shown(p) for p in parts)
