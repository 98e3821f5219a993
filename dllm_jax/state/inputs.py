"""Checks at the door: bad input is refused with its value and the rule before anything compiles.

What comes in, as lists or arrays, becomes numpy arrays of one dtype. Of a traced array only shape and dtype
are checked. Of a global one, which several processes hold parts of, each process checks the sequences it
holds; both stay what they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from dllm_jax.nn.model import check_embeds
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import shown
from dllm_jax.options.hints import Notice
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray

Ids = ArrayLike | Sequence[int] | Sequence[Sequence[int]] | Sequence[AnyArray]  # Int[b p], Int[p], or lists
Embeds = Float[AnyArray, "..."]  # Float[b p m], or of one sequence Float[p m]
EMBEDS_PLACEHOLDER = -1  # instead of a token id: the input is a row of `prompt_embeds`
HINTS = {
    EMBEDS_PLACEHOLDER: "; -1 is for inputs of prompt_embeds= or embeds=, or images= of a Batch",
    -100: "; -100 marks answer tokens that training leaves out. Leave out padding by a mask",
}
Side = Literal["left", "right"]


class Prompts(NamedTuple):
    """The prompts of a batch.

    Attributes:
      ids: token ids, left-padded, `EMBEDS_PLACEHOLDER` where the input is a row of `embeds`.
      mask: False at padding; None if nothing is padded.
      embeds: None if there are no such positions.
    """

    ids: Int[AnyArray, "b p"]
    mask: Bool[AnyArray, "b p"] | None
    embeds: Float[AnyArray, "b p m"] | None


def prompts(prompt: Ids, mask: ArrayLike | None, embeds: Embeds | None, spec: ModelSpec) -> Prompts:
    """The prompts of `generate`: padded, checked, and with the inputs that stand in place of embeddings.

    A prompt without tokens is one of padding alone, as a batch may hold: its response attends to itself.

    Args:
      prompt: Token ids in any form that `padded_ids` accepts; `EMBEDS_PLACEHOLDER` where `embeds` are used.
      mask: False (or 0) at padding; None means none.
      embeds: Float[b p m], or [p m] of one sequence; None if there are none.
      spec: the model.

    Raises:
      ValueError: what breaks a rule of ids or masks, or holds masks; inputs of another shape or dtype, or of
        which none is read.
    """
    # Without inputs to stand for, -1 is outside of the vocabulary as any negative id is.
    least = 0 if embeds is None else EMBEDS_PLACEHOLDER
    ids, mask = padded_ids(prompt, mask, spec, "prompt", least=least, empty=True)
    no_masks(ids, spec)
    if embeds is None:
        return Prompts(ids, mask, None)
    embeds = host.fetched(embeds) if hasattr(embeds, "shape") else embeds
    if hasattr(embeds, "ndim") and embeds.ndim == 2:
        embeds = embeds[None]
    check_embeds(embeds, (*ids.shape, spec.width), "prompt_embeds")
    if (known := host.readable(ids)) is not None and not (known == EMBEDS_PLACEHOLDER).any():
        raise ValueError(
            "prompt holds no -1 (dllm_jax.EMBEDS_PLACEHOLDER): nothing of prompt_embeds would be read"
        )
    return Prompts(ids, mask, embeds)


def padded_ids(
    tokens: Ids,
    mask: ArrayLike | None,
    spec: ModelSpec | None,
    name: str,
    *,
    side: Side = "left",
    least: int = 0,
    empty: bool = False,
) -> tuple[Int[AnyArray, "b p"], Bool[AnyArray, "b p"] | None]:
    """Token ids, and where they are padding; sequences of different lengths are padded with end-of-text.

    Args:
      tokens: Int[b p] with a mask, or sequences of any lengths without; one sequence may come as [p].
      mask: False (or 0) at the padding of `tokens`; None means none.
      spec: the model; None where it is not known: padding is 0 then, and no id is outside of a vocabulary.
      name: Name of the argument; its mask is `token_mask` of `tokens`, `prompt_mask` of `source`.
      side: Side of the padding.
      least: smallest id that is allowed.
      empty: whether sequences may have no tokens.

    Returns:
      int32 ids, and False at padding; None if nothing is padded.

    Raises:
      ValueError: no such ids or mask, sequences without tokens, or a mask with sequences of different
        lengths.
    """
    tokens, mask = _encoded(tokens, mask, name)
    lengths = lengths_of(tokens)

    # Lists of one length are as good as an array, and may have a mask.
    if lengths is not None and (len(set(lengths)) > 1 or 0 in lengths):
        if mask is not None:
            raise ValueError(
                f"{name} has sequences of lengths {lengths}, which are padded for you: pass no mask"
            )
        if not empty:
            no_empty(tokens, name)
        tokens, mask = padded_together(tokens, 0 if spec is None else spec.eos_id, side=side)
    ids = token_ids(tokens, spec, name, least)
    if mask is not None:
        of_mask = "prompt_mask" if name == "source" else f"{name.removesuffix('s')}_mask"
        mask = padding(mask, ids.shape, of_mask, side, empty)
    return ids, mask


def _encoded(tokens: Any, mask: Any, name: str) -> tuple[Any, Any]:
    """Takes ids and mask out of a tokenizer's `BatchEncoding`; raises ValueError for text and messages."""
    several = tokens if isinstance(tokens, list | tuple) else [tokens]
    if any(isinstance(item, str) for item in several):
        raise ValueError(
            f"{name}={shown(tokens)} is text: pass token ids, such as tokenizer(text)['input_ids'], or call "
            "dj.chat(model, tokenizer, messages)"
        )
    first = (*several, *(item[0] for item in several if isinstance(item, list) and item))
    if any(isinstance(item, Mapping) and "role" in item for item in first):
        raise ValueError(
            f"{name}={shown(tokens)} is a conversation. Call dj.chat(model, tokenizer, messages), or pass "
            "token ids, such as tokenizer.apply_chat_template(messages)."
        )
    if not isinstance(tokens, Mapping):
        return tokens, mask
    if "input_ids" not in tokens or mask is not None:
        rule = (
            "takes its mask from attention_mask: pass no other"
            if "input_ids" in tokens
            else "must have input_ids"
        )
        raise ValueError(f"{name} with the keys {', '.join(map(str, tokens))} {rule}")
    ids, mask = tokens["input_ids"], tokens.get("attention_mask")
    lengths = lengths_of(ids)
    if mask is None or (lengths is not None and len(set(lengths)) > 1):  # lists that are not padded yet
        return ids, None
    ids, mask = np.asarray(ids), np.asarray(mask)
    return (ids[None], mask[None]) if ids.ndim == 1 else (ids, mask)


def no_empty(tokens: Any, name: str):
    """Raises if one of several sequences has no tokens."""
    lengths = lengths_of(tokens)
    if lengths is not None and 0 in lengths:
        raise ValueError(f"{name}[{lengths.index(0)}] is empty: give it at least one token")


def lengths_of(tokens: Any) -> list[int] | None:
    """How long each of several sequences is; None of what is one sequence, or an array with columns."""
    # An array without columns is a batch of empty prompts, not one empty sequence.
    if getattr(tokens, "ndim", 0) == 2 and tokens.shape[1] == 0 and not host.stays_on_devices(tokens):
        return [0] * tokens.shape[0]
    if not isinstance(tokens, Sequence):
        return None
    flat = [isinstance(ids, Sequence) or getattr(ids, "ndim", 0) == 1 for ids in tokens]
    if isinstance(tokens, str) or not tokens or not all(flat) or any(isinstance(ids, str) for ids in tokens):
        return None
    return [len(ids) for ids in tokens]


def padded_together(
    sequences: Any, pad_id: int, width: int | None = None, side: Side = "left"
) -> tuple[np.ndarray, Bool[np.ndarray, "b p"]]:
    """Sequences of different lengths as one array, and its mask, False at the padding.

    Args:
      sequences: token ids of each, lists or arrays of one axis.
      pad_id: token id to pad with.
      width: Width of the array, at least the length of the longest sequence. None: that length, or 1.
      side: Side of the padding.
    """
    width = max(1, *map(len, sequences)) if width is None else width
    column, length = np.arange(width), np.asarray([len(ids) for ids in sequences])[:, None]
    mask = column >= width - length if side == "left" else column < length
    pads = ([pad_id] * (width - len(ids)) for ids in sequences)
    both = zip(pads, (np.asarray(ids).tolist() for ids in sequences), strict=True)
    rows = [pad + ids if side == "left" else ids + pad for pad, ids in both]
    return np.asarray(rows), mask


def token_ids(tokens: Ids, spec: ModelSpec | None, name: str, least: int = 0) -> Int[AnyArray, "b p"]:
    """Tokens as int32 [b p]; a single sequence may come as [p].

    Args:
      tokens: Token ids of the user.
      spec: the model; None where it is not known.
      name: Name of the argument.
      least: smallest value that is allowed, `EMBEDS_PLACEHOLDER` where inputs may stand in place of ids.

    Raises:
      ValueError: wrong rank, dtype, no sequences or positions, or ids outside the vocabulary.
    """
    tokens = host.array(name, tokens, "token ids [batch, positions]")
    if tokens.ndim == 1:
        tokens = tokens[None]
    if tokens.ndim != 2:
        raise ValueError(f"{name} has shape {tokens.shape}; expected [batch, positions]")
    if tokens.shape[0] == 0:
        raise ValueError(f"{name} has shape {tokens.shape}: the batch is empty")
    if tokens.shape[1] == 0:
        raise ValueError(f"{name} has shape {tokens.shape}: it holds no tokens")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {tokens.dtype}; token ids must be integers")
    check_ids(name, tokens, spec, least)
    return tokens.astype(np.int32)


def check_ids(name: str, tokens: Int[AnyArray, "b p"], spec: ModelSpec | None, least: int):
    """Raises ValueError for ids outside of the vocabulary, or below `least`."""
    # Of traced ids nothing is known: inside of jit only shapes and dtypes are checked.
    if (known := host.readable(tokens)) is None:
        return
    vocab = 2**31 if spec is None else spec.vocab
    outside = (known < least) | (known >= vocab)
    if outside.any():
        token = known[outside][0]
        hint = HINTS.get(int(token), "")
        raise ValueError(f"{name} holds id {token}, outside the vocabulary [0, {vocab}){hint}")


def no_masks(
    tokens: Int[AnyArray, "b p"],
    spec: ModelSpec,
    name: str = "prompt",
    fix: str = "use infill() to fill masks anywhere, on models without a causal context",
):
    """Raises if a prompt or an answer holds mask ids, which only `infill` fills; `fix` says what to do."""
    if (known := host.readable(tokens)) is None:
        return
    sequence, position = np.nonzero(spec.undecided(known))
    if sequence.size:
        raise ValueError(
            f"{name}[{sequence[0]}, {position[0]}] is the mask id {spec.mask_id}: the {name} must be fully "
            f"decoded; {fix}"
        )


def padding(
    mask: ArrayLike, shape: tuple[int, ...], name: str, side: Side = "left", empty: bool = False
) -> Bool[AnyArray, "b p"] | None:
    """A padding mask as Bool[b p], or None if nothing is padded.

    Args:
      mask: Mask of the user.
      shape: Shape of the tokens.
      name: Name of the argument.
      side: Side of the padding.
      empty: whether a sequence may be padding alone.

    Raises:
      ValueError: wrong shape or dtype, a sequence without any token, or padding that is not on its side.
    """
    mask = host.array(name, mask, "a mask [batch, positions]")
    mask = flags(name, mask[None] if mask.ndim == 1 else mask, shape, "the tokens")
    if (known := host.readable(mask)) is not None:
        _check_padding(known, name, side, empty)
        # Of a global mask no process knows the whole: it always counts as padding.
        if known.all() and not host.is_global(mask):
            return None
    return mask


def flags(name: str, array: AnyArray, shape: tuple[int, ...], of: str) -> Bool[AnyArray, "..."]:
    """Booleans, or whole numbers 0 and 1, as booleans.

    Args:
      name: Name of the argument.
      array: Array of the user.
      shape: Shape that it must have.
      of: What has that shape, for the message.

    Raises:
      ValueError: another shape, another dtype, or other numbers.
    """
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}, that of {of}")
    if array.dtype != bool and not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {array.dtype}; expected bool or 0/1 integers")
    if (known := host.readable(array)) is not None and not np.isin(known, (0, 1)).all():
        raise ValueError(f"{name} holds {known[~np.isin(known, (0, 1))][0]}; expected 0 or 1")
    return array.astype(bool)


def canvas_padding(mask: ArrayLike | None, batch: int, length: int) -> Bool[AnyArray, "b l"] | None:
    """Marks positions of a canvas that are no padding, by the mask of its prompts; None if nothing is padded.

    Raises:
      ValueError: as `padding`, or a mask longer than the canvas.
    """
    if mask is None:
        return None
    width = (0, *np.shape(mask))[-1]
    if width > length:
        raise ValueError(f"prompt_mask has {width} positions; the canvas has {length}")
    known = padding(mask, (batch, width), "prompt_mask")
    return None if known is None else host.pad(known, 0, length - width, True)


def _check_padding(mask: np.ndarray, name: str, side: Side, empty: bool):
    if not empty and not mask.any(axis=1).all():
        raise ValueError(f"{name} hides every token of sequence {int(np.argmin(mask.any(axis=1)))}")

    # From left to right a left-padded mask may only rise, a right-padded one only fall.
    step = mask[:, 1:].astype(int) - mask[:, :-1]
    holes = np.any(step < 0 if side == "left" else step > 0, axis=1)
    if holes.any():
        order = "before" if side == "left" else "after"
        raise ValueError(
            f"{name} of sequence {int(np.argmax(holes))} is not {side} padding: zeros only stand {order} ones"
        )


def masked_response(
    prompt: Int[AnyArray, "b p"], mask: Bool[AnyArray, "b p"] | None, length: int, spec: ModelSpec
) -> tuple[Int[AnyArray, "b l"], Bool[AnyArray, "b l"]]:
    """Prompts followed by `length` masks each, and which positions are not padding (`mask`: the prompts')."""
    real = np.ones(prompt.shape, bool) if mask is None else mask
    return host.pad(prompt, 0, length, spec.mask_id), host.pad(real, 0, length, True)


class IdleStepsWarning(UserWarning):
    """Denoising steps of a generation have nothing to decode; recorded runs of LLaDA and Dream have some."""


class PositionsWarning(UserWarning):
    """A canvas is longer than the sequences that the model was made for."""


def notices_of_length(length: int, spec: ModelSpec) -> list[Notice]:
    """The warning of a canvas with more positions than the model was made for (`ModelSpec.positions`)."""
    if spec.positions is None or length <= spec.positions:
        return []
    extend = "" if spec.rope_scaling else " Use load(path, rope_factor=...) to extend it."
    message = (
        f"prompt and response exceed {spec.positions} tokens, the model's context length: quality may "
        f"degrade.{extend}"
    )
    return [Notice(message, PositionsWarning)]
