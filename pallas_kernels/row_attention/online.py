"""Online softmax over tiles of slots, shared by every implementation."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.grouped import product

LOWEST = -1e30  # below any score, and still finite when subtracted


class OnlineSoftmax(NamedTuple):
    """Sums over the tiles seen, per row.

    Attributes:
      top: largest score.
      total: sum of e = exp(score - top).
      out: sum of e times value.
    """

    top: Float[Array, "*b r 1"]
    total: Float[Array, "*b r 1"]
    out: Float[Array, "*b r d"]


def init(shape: tuple[int, ...]) -> OnlineSoftmax:
    """The state before the first tile, for rows [*b r d]."""
    column = (*shape[:-1], 1)
    return OnlineSoftmax(
        jnp.full(column, LOWEST, jnp.float32), jnp.zeros(column, jnp.float32), jnp.zeros(shape, jnp.float32)
    )


def update(
    before: OnlineSoftmax,
    scores: Float[Array, "*b r t"],
    visible: Bool[Array, "*#b #r t"],
    v: Float[Array, "*b t d"],
) -> OnlineSoftmax:
    """The state with one more tile.

    Args:
      before: the state of the other tiles.
      scores: anything where not visible.
      visible: slots that are new and may be attended to.
      v: their values, finite where no row may attend.
    """
    top = jnp.maximum(before.top, jnp.max(jnp.where(visible, scores, LOWEST), axis=-1, keepdims=True))
    scale = jnp.exp(before.top - top)
    weight = jnp.where(visible, jnp.exp(scores - top), 0.0)
    return OnlineSoftmax(
        top=top,
        total=before.total * scale + jnp.sum(weight, axis=-1, keepdims=True),
        out=before.out * scale + product(weight.astype(v.dtype), v, 0),
    )


def merge(parts: OnlineSoftmax) -> OnlineSoftmax:
    """One state from those of several ranges of slots, stacked on the first axis."""
    top = jnp.max(parts.top, axis=0)
    scale = jnp.exp(parts.top - top)
    return OnlineSoftmax(top, jnp.sum(parts.total * scale, axis=0), jnp.sum(parts.out * scale, axis=0))


def finalize(running: OnlineSoftmax) -> tuple[Float[Array, "*b r d"], Float[Array, "*b r 1"]]:
    """Attention and log-sum-exp after the last tile; 0 and -inf for rows that may attend to nothing."""
    some = running.total > 0
    safe = jnp.where(some, running.total, 1.0)
    return running.out / safe, jnp.where(some, running.top + jnp.log(safe), -jnp.inf)
