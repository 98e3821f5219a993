"""Finds the best entries of each row in XLA, without a sort.

A sort of 1000 entries takes the TPU compiler several seconds, in every step variant of a program.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.counting import count_marked
from pallas_kernels.topk_evict import bisection

FEW = 128  # entries of which ranks are counted in two parts: more would not lie well on TPUs
COMPARABLE = 2048  # entries of which all pairs are compared: 4 million, less work than the passes of a sort


def best(score: Float[Array, "n l"], count: Int[Array, "n 1"]) -> Bool[Array, "n l"]:
    """The `count` largest of each of n lines, ties to the lower index, and never one of -inf or NaN."""
    # Few pairs are compared at once; many cost more than the 32 passes of a bisection.
    if score.shape[0] * score.shape[1] ** 2 > COMPARABLE**2:
        return bisection.best(score, count)
    score = jnp.where(score > -jnp.inf, score, -jnp.inf)
    return (ranks(score) < count) & (score > -jnp.inf)


def ranks(priority: Float[Array, "*b c"]) -> Int[Array, "*b c"]:
    """Rank of each entry along the last axis, 0 for the largest, ties to the lower index; no NaN."""
    if priority.shape[-1] > COMPARABLE:
        return jnp.argsort(jnp.argsort(-priority, axis=-1, stable=True), axis=-1)

    # An entry's rank is the number of larger ones, and of equal ones before it. It is not compared with
    # itself: XLA may compute the two sides apart, and round them differently.
    mine, other = priority[..., :, None], priority[..., None, :]
    index = jnp.arange(priority.shape[-1])
    own = index[None, :] == index[:, None]
    ahead = ~own & ((other > mine) | ((other == mine) & (index[None, :] < index[:, None])))
    return count_marked(ahead, FEW)
