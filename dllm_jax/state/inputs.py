"""Checks at the door: bad input is refused with its value and the rule before anything compiles."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.state import host

Ids = ArrayLike | Sequence[int] | Sequence[Sequence[int]]  # Int[b p], or one sequence Int[p]


def token_ids(tokens: Ids, spec: ModelSpec, name: str) -> Int[Array, "b p"]:
    """Tokens as int32 [b p]; a single sequence may come as [p].

    Raises:
      ValueError: wrong rank, dtype, no sequences or positions, or ids outside the vocabulary.
    """
    if isinstance(tokens, Sequence):
        lengths = [len(ids) for ids in tokens if isinstance(ids, Sequence)]
        if len(set(lengths)) > 1:
            raise ValueError(f"{name} has sequences of lengths {lengths}: left-pad them and pass a mask")
    if not isinstance(tokens, Tracer):
        tokens = np.asarray(tokens)
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
    if isinstance(tokens, np.ndarray):
        outside = (tokens < 0) | (tokens >= spec.vocab)
        if outside.any():
            raise ValueError(
                f"{name} holds id {tokens[outside][0]}, outside the vocabulary [0, {spec.vocab})"
            )
    return host.place(tokens, np.int32)


def no_masks(tokens: Int[Array, "b p"], spec: ModelSpec, name: str = "prompt"):
    """Raises if a prompt or an answer holds mask ids, which only `infill` fills."""
    if isinstance(tokens, Tracer):
        return
    sequence, position = np.nonzero(np.asarray(tokens) == spec.mask_id)
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
    if mask is None:
        return None
    if not isinstance(mask, Tracer):
        mask = np.asarray(mask)
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != shape:
        raise ValueError(f"{name} has shape {mask.shape}; expected {shape}, that of the tokens")
    if not (jnp.issubdtype(mask.dtype, jnp.bool_) or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise ValueError(f"{name} has dtype {mask.dtype}; expected bool or 0/1 integers")
    if isinstance(mask, np.ndarray):
        if not np.isin(mask, (0, 1)).all():
            raise ValueError(f"{name} holds {mask[~np.isin(mask, (0, 1))][0]}; expected 0 or 1")
        mask = mask.astype(bool)
        if not mask.any(axis=1).all():
            raise ValueError(f"{name} hides every token of sequence {int(np.argmin(mask.any(axis=1)))}")
        holes = ~np.all(mask[:, 1:] >= mask[:, :-1], axis=1)
        if holes.any():
            raise ValueError(
                f"{name} of sequence {int(np.argmax(holes))} is not left padding: zeros only stand before "
                "ones"
            )
        if mask.all():
            return None
    return host.place(mask, bool)
