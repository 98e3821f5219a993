"""Text in, text out, with the checkpoint's own chat template."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from dllm_jax.decoding.buckets import Ladder, check_ladder
from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.watch import recording
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument, shown
from dllm_jax.samplers import Confidence, Sampler
from dllm_jax.state import host
from dllm_jax.state.inputs import Prompts, padded_together

Message = dict[str, Any]
PARTS = "role", "content"
RULE = 'must be messages {"role": "user", "content": "..."}, or a list of such conversations'


@runtime_checkable
class Processor(Protocol):
    """What makes prompts of conversations that are not text alone, such as `dllm_jax.vision.Processor`."""

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, which turns answers into text."""
        ...

    @property
    def suppress_tokens(self) -> tuple[int, ...]:
        """Token ids that an answer never holds."""
        ...

    def encode(self, model: Model, conversations: list[list[Message]], ladder: Ladder | None) -> Prompts:
        """Prompts up to where the answers begin, of a length of the ladder if there is one."""
        ...


def chat(
    model: Model,
    tokenizer: Any,
    messages: list[Message] | list[list[Message]],
    *,
    stop: Sequence[str] = (),
    sampler: Sampler = Confidence(),
    buckets: Ladder | None = None,
    **options: Any,
) -> str | list[str]:
    """Answers a conversation, or a batch of them.

    Args:
      model: from `load`.
      tokenizer: the checkpoint's, from transformers' `AutoTokenizer.from_pretrained`; for prompts with images
        a processor, from `dllm_jax.vision.Processor.load`.
      messages: [{"role": "user", "content": "..."}, ...], or a list of such conversations. With a processor,
        messages may hold images: {"content": "<image>\\nWhat is it?", "images": ["cat.png"]}.
      stop: texts at which the answer ends, without them; see `stop` of `generate`.
      sampler: as in `generate`; the ids that a processor suppresses are added to its own.
      buckets: as in `generate`.
      **options: passed on to `generate` (length, block, steps, policy, key, ...).

    Returns:
      the answer, cut at the first end-of-text or end-of-turn, without special tokens; one string per
      conversation for a batch.

    Raises:
      ValueError: an empty conversation, what is no conversation, a tokenizer without a chat template, or
        images that do not go with their message.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_argument("sampler", sampler, Sampler, ", such as dj.samplers.Confidence()")
    processor = tokenizer if isinstance(tokenizer, Processor) and not isinstance(tokenizer, type) else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    check_tokenizer(tokenizer)
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages={shown(messages)} {RULE}")
    single = bool(messages) and isinstance(messages[0], dict)
    conversations = cast(list[list[Message]], [messages] if single else messages)
    if not conversations:
        raise ValueError("messages are empty: there is no conversation to answer")
    if processor is None:
        prompts = Prompts(*encode_chats(tokenizer, conversations, model.spec.eos_id), None)
    else:
        if buckets is not None:
            check_ladder("buckets", buckets)
        prompts = processor.encode(model, conversations, buckets)

        # Each once and in a fixed order: the ids are static, and another order would be another program.
        both = dict.fromkeys((*(sampler.suppress_tokens or ()), *processor.suppress_tokens))
        sampler = dataclasses.replace(sampler, suppress_tokens=tuple(both) or None)
    out = generate(
        model,
        prompts.ids,
        prompt_mask=prompts.mask,
        prompt_embeds=prompts.embeds,
        stop=[tokenizer.encode(text, add_special_tokens=False) for text in _texts(stop)],
        sampler=sampler,
        buckets=buckets,
        **options,
    )
    answers = decode_answers(model, tokenizer, host.everywhere(out.tokens)[:, prompts.ids.shape[1] :])
    return answers[0] if single else answers


def _texts(stop: Any) -> Sequence[str]:
    """The stop texts; raises ValueError if they are none."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop={shown(stop)} must be a list of texts, none of them empty")
    return stop


def encode_chats(
    tokenizer: Any, conversations: list[list[Message]], pad_id: int
) -> tuple[Int[np.ndarray, "b p"], Bool[np.ndarray, "b p"]]:
    """Templated prompts, left-padded, and their padding mask; raises as `chat` does."""
    if not conversations:
        raise ValueError("messages are empty: there is no conversation to answer")
    return padded_together([chat_ids(tokenizer, one) for one in conversations], pad_id)


def chat_ids(tokenizer: Any, conversation: list[Message]) -> list[int]:
    """Token ids of a conversation under the chat template, up to where the answer begins.

    Raises:
      ValueError: an empty conversation, or a tokenizer without a chat template.
    """
    if not isinstance(conversation, list | tuple):
        raise ValueError(f"messages={shown(conversation)} {RULE}")
    if not conversation:
        raise ValueError("messages are empty: a conversation needs at least one message")
    for message in conversation:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in PARTS):
            raise ValueError(f"messages hold {shown(message)}: they {RULE}")
    if tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template: use generate() with ids, or an instruct checkpoint"
        )

    # A message that spells a special token, the mask's above all, must not become one.
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token in message["content"] for message in conversation for token in special):
        return _plain_ids(tokenizer, conversation, special)
    encoded = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _plain_ids(tokenizer: Any, conversation: list[Message], special: list[str]) -> list[int]:
    """`chat_ids` of messages that hold the text of special tokens, such as the mask's: there it is only text.

    Raises:
      ValueError: the template or the tokenizer does not tell its special tokens from those of the messages.
    """
    # The template around messages: what it writes for marks that no text has in their place.
    render = lambda messages: tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    marks = [f"\ue000{i}\ue001" for i in range(len(conversation))]
    marked = [message | {"content": mark} for message, mark in zip(conversation, marks, strict=True)]
    first, *around = re.split("\ue000\\d+\ue001", render(marked))
    rendered, ids = render(conversation), list(tokenizer.encode(first, add_special_tokens=False))

    # Between two pieces of the template stands a message, as it is or without white space at its ends.
    place = len(first) if rendered.startswith(first) and len(around) == len(marks) else len(rendered)
    for message, piece in zip(conversation, around, strict=False):
        found = (text for text in (message["content"], message["content"].strip()))
        text = next((text for text in found if rendered.startswith(text + piece, place)), None)
        if text is not None:
            place += len(text + piece)
            plain = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            ids += [*plain, *tokenizer.encode(piece, add_special_tokens=False)]
        if text is None or not {tokenizer.convert_ids_to_tokens(i) for i in plain}.isdisjoint(special):
            raise ValueError(
                f"the message {shown(message['content'])} holds the text of special tokens of the model "
                f"({', '.join(t for t in special if t in message['content'])}), which this tokenizer cannot "
                "write as plain text: say it in other words"
            )
    return ids


def check_tokenizer(tokenizer: Any):
    """Raises ValueError if a tokenizer is none of transformers' kind."""
    needed = "chat_template", "apply_chat_template", "added_tokens_decoder", "decode"
    recording.check_tokenizer(tokenizer, *needed)


def decode_answers(model: Model, tokenizer: Any, responses: np.ndarray) -> list[str]:
    """Text of each response up to its first end-of-text, end-of-turn or other stop id."""
    # Whichever comes first; of some models no end-of-turn is known.
    ends = [i for i in (*model.spec.ends, model.spec.eot_id) if i is not None]
    cut = [ids[: np.argmax(hit)] if (hit := np.isin(ids, ends)).any() else ids for ids in responses]
    return [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in cut]
