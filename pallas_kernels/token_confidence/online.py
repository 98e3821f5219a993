"""Confidence summed up over tiles of the vocabulary, shared by XLA's form and the kernels.

As in the online softmax, sums are relative to the largest logit so far, and rescaled when a larger one comes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOWEST = -1e30  # below any logit, and still finite when subtracted
NO_TOKEN = 2**30


class OnlineConfidence(NamedTuple):
    """Sums over the tiles seen, one column per position; of n ranges of tokens apart, see `merge`, or of all.

    Attributes:
      token: lowest id with the largest logit.
      best: that logit.
      second: the second largest, as large as `best` for a tie.
      top: largest logit, the forbidden token's included.
      total: sum of e = exp(logit - top).
      weighted: sum of e (logit - top).
    """

    token: Int[Array, "*n c 1"]
    best: Float[Array, "*n c 1"]
    second: Float[Array, "*n c 1"]
    top: Float[Array, "*n c 1"]
    total: Float[Array, "*n c 1"]
    weighted: Float[Array, "*n c 1"]


def init(positions: int) -> OnlineConfidence:
    """The state before the first tile."""
    column = lambda value: jnp.full((positions, 1), value, jnp.float32)
    nothing = column(-jnp.inf)
    token = jnp.zeros((positions, 1), jnp.int32)
    return OnlineConfidence(token, nothing, nothing, column(LOWEST), column(0), column(0))


def update(
    before: OnlineConfidence,
    logits: Float[Array, "c t"],
    ids: Int[Array, "c t"],
    first: int | Int[Array, ""],
    valid: int,
    forbidden: int | None,
) -> OnlineConfidence:
    """The state with one more tile.

    Args:
      before: the state of the tiles with lower ids.
      logits: of this tile; anything where ids lie outside of [first, valid).
      ids: tokens of the tile.
      first: lowest id that is new.
      valid: size of the vocabulary.
      forbidden: a token that cannot be the best one.
    """
    # The best two of this tile; a tie with earlier tiles goes to those, which have lower ids.
    new = (ids >= first) & (ids < valid)
    logits = jnp.where(new, logits, -jnp.inf)
    candidates = logits if forbidden is None else jnp.where(ids == forbidden, -jnp.inf, logits)
    best = jnp.max(candidates, axis=1, keepdims=True)
    token = jnp.min(jnp.where(candidates == best, ids, NO_TOKEN), axis=1, keepdims=True)
    second = jnp.max(jnp.where(ids == token, -jnp.inf, candidates), axis=1, keepdims=True)

    # Softmax and entropy: with a new largest logit, e shrinks by exp(shift), and e (logit - top) by that and
    # e shift.
    top = jnp.maximum(before.top, jnp.max(logits, axis=1, keepdims=True))
    shift = before.top - top
    scale = jnp.exp(shift)
    below = jnp.where(new, logits - top, 0.0)
    weight = jnp.where(new, jnp.exp(below), 0.0)
    return OnlineConfidence(
        token=jnp.where(best > before.best, token, before.token),
        best=jnp.maximum(best, before.best),
        second=jnp.maximum(jnp.minimum(best, before.best), jnp.maximum(second, before.second)),
        top=top,
        total=before.total * scale + jnp.sum(weight, axis=1, keepdims=True),
        weighted=(before.weighted + shift * before.total) * scale
        + jnp.sum(weight * below, axis=1, keepdims=True),
    )


def merge(parts: OnlineConfidence) -> OnlineConfidence:
    """One state from those of several ranges of tokens [n c 1], the ranges ascending."""
    # The first range with the best logit wins; the second best token is its second, or the best of another
    # range.
    first = jnp.argmax(parts.best, axis=0, keepdims=True)
    winner = jnp.arange(parts.best.shape[0])[:, None, None] == first
    top = jnp.max(parts.top, axis=0)
    shift = parts.top - top
    scale = jnp.exp(shift)
    return OnlineConfidence(
        token=jnp.take_along_axis(parts.token, first, axis=0)[0],
        best=jnp.max(parts.best, axis=0),
        second=jnp.max(jnp.where(winner, parts.second, parts.best), axis=0),
        top=top,
        total=jnp.sum(parts.total * scale, axis=0),
        weighted=jnp.sum((parts.weighted + shift * parts.total) * scale, axis=0),
    )


def finalize(
    running: OnlineConfidence,
) -> tuple[Int[Array, "c 1"], Float[Array, "c 1"], Float[Array, "c 1"], Float[Array, "c 1"]]:
    """Token, probability, margin and negative entropy after the last tile."""
    # p = e / total, and sum p log p = sum e (logit - top) / total - log total.
    probability = jnp.exp(running.best - running.top) / running.total
    other = jnp.exp(running.second - running.top) / running.total
    entropy = running.weighted / running.total - jnp.log(running.total)
    return running.token, probability, probability - other, entropy
