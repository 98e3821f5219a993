"""Checks at the door: bad input is refused with its value and the rule before anything compiles.

Of a traced array only shape and dtype are checked. Of a global one, which several processes hold parts of,
each process checks the sequences it holds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.model import check_embeds
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import shown
from dllm_jax.state import host

Ids = ArrayLike | Sequence[int] | Sequence[Sequence[int]]  # Int[b p], or one sequence Int[p]
Embeds = Float[Array, "..."] | Float[np.ndarray, "..."]  # Float[b p m], or of one sequence Float[p m]
EMBEDDED = -1  # in the place of a token id: the input is a row of `prompt_embeds`


class Prompts(NamedTuple):
    """The prompts of a batch, as `generate` takes them.

    Attributes:
      ids: token ids, left-padded, `EMBEDDED` where the input is a row of `embeds`.
      mask: False at padding.
      embeds: None if there are no such positions.
    """

    ids: Int[Array, "b p"]
    mask: Bool[Array, "b p"]
    embeds: Float[Array, "b p m"] | None


def token_ids(tokens: Ids, spec: ModelSpec, name: str, least: int = 0) -> Int[Array, "b p"]:
    """Tokens as int32 [b p]; a single sequence may come as [p].

    Args:
      tokens: what the user passed.
      spec: the model.
      name: what the user calls it.
      least: smallest value that is allowed, `EMBEDDED` where inputs may stand in the place of ids.

    Raises:
      ValueError: wrong rank, dtype, no sequences or positions, or ids outside the vocabulary.
    """
    if isinstance(tokens, Sequence):
        lengths = [len(ids) for ids in tokens if isinstance(ids, Sequence)]
        if len(set(lengths)) > 1:
            raise ValueError(f"{name} has sequences of lengths {lengths}: left-pad them and pass a mask")
    tokens = _array(tokens, name, "token ids [batch, positions]")
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
    if (known := host.readable(tokens)) is not None:
        outside = (known < least) | (known >= spec.vocab)
        if outside.any():
            found = known[outside][0]
            hint = "; -1 is for inputs of prompt_embeds=" if found == EMBEDDED else ""
            raise ValueError(f"{name} holds id {found}, outside the vocabulary [0, {spec.vocab}){hint}")
    return host.place(tokens, np.int32)


def embedded_ids(
    prompt: Ids, embeds: Embeds | None, spec: ModelSpec
) -> tuple[Int[Array, "b p"], Float[Array, "b p m"] | None]:
    """Prompts, and the inputs that stand in the place of embeddings where they hold `EMBEDDED`.

    Raises:
      ValueError: as `token_ids`; inputs of another shape or dtype, or of which none is read.
    """
    if embeds is None:
        return token_ids(prompt, spec, "prompt"), None
    ids = token_ids(prompt, spec, "prompt", EMBEDDED)
    embeds = host.fetched(embeds) if hasattr(embeds, "shape") else embeds
    if hasattr(embeds, "ndim") and embeds.ndim == 2:
        embeds = embeds[None]
    check_embeds(embeds, (*ids.shape, spec.width), "prompt_embeds")
    if (known := host.readable(ids)) is not None and not (known == EMBEDDED).any():
        raise ValueError("prompt holds no -1 (dllm_jax.EMBEDDED): nothing of prompt_embeds would be read")
    return ids, host.place(embeds, embeds.dtype)


def no_masks(tokens: Int[Array, "b p"], spec: ModelSpec, name: str = "prompt"):
    """Raises if a prompt or an answer holds mask ids, which only `infill` fills."""
    if (known := host.readable(tokens)) is None:
        return
    sequence, position = np.nonzero(known == spec.mask_id)
    if sequence.size:
        raise ValueError(
            f"{name}[{sequence[0]}, {position[0]}] is the mask id {spec.mask_id}: the {name} must be fully "
            "decoded; use infill() to fill masks anywhere"
        )


def left_padding(mask: ArrayLike | None, shape: tuple[int, ...], name: str) -> Bool[Array, "b p"] | None:
    """A padding mask as Bool[b p], or None if nothing is padded; `name` is what the user calls it.

    Raises:
      ValueError: wrong shape or dtype, a sequence without any token, or padding that is not on the left.
    """
    return _padding(mask, shape, name, left=True)


def right_padding(mask: ArrayLike | None, shape: tuple[int, ...], name: str) -> Bool[Array, "b p"] | None:
    """`left_padding` of what is padded on the right."""
    return _padding(mask, shape, name, left=False)


def _padding(
    mask: ArrayLike | None, shape: tuple[int, ...], name: str, left: bool
) -> Bool[Array, "b p"] | None:
    if mask is None:
        return None
    mask = _array(mask, name, "a mask [batch, positions]")
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != shape:
        raise ValueError(f"{name} has shape {mask.shape}; expected {shape}, that of the tokens")
    if not (jnp.issubdtype(mask.dtype, jnp.bool_) or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"{name} has dtype {mask.dtype}; expected bool or 0/1 integers")
    if (known := host.readable(mask)) is not None:
        _check_padding(known, name, left)
        # Of a global mask no process knows the whole: it always counts as padding.
        if known.astype(bool).all() and not host.is_global(mask):
            return None
    return host.place(mask, bool)


def _array(value: Ids, name: str, rule: str) -> Array | np.ndarray:
    """What a user passed as an array, on the host unless it stays on devices; refused if it is none."""
    try:
        return host.fetched(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}={shown(value)} must be {rule}") from error


def _check_padding(mask: np.ndarray, name: str, left: bool):
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{name} holds {mask[~np.isin(mask, (0, 1))][0]}; expected 0 or 1")
    mask = mask.astype(bool)
    if not mask.any(axis=1).all():
        raise ValueError(f"{name} hides every token of sequence {int(np.argmin(mask.any(axis=1)))}")
    step = mask[:, 1:].astype(int) - mask[:, :-1]
    holes = np.any(step < 0 if left else step > 0, axis=1)
    if holes.any():
        side, order = ("left", "before") if left else ("right", "behind")
        raise ValueError(
            f"{name} of sequence {int(np.argmax(holes))} is not {side} padding: zeros only stand {order} ones"
        )
