"""Counts of marked entries, in one kernel on CPUs.

There XLA makes three kernels of a reduction over more than `WINDOW` entries, and what it reads and what reads
it are kernels of their own. Whole numbers can be added in any order, so short lines are added in two parts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

WINDOW = 32
LONGEST = WINDOW**2  # entries of a line of which both parts have at most `WINDOW`


def count_marked(marked: Bool[Array, "*b l"], longest: int = LONGEST) -> Int[Array, "*b"]:
    """How many entries of each line are marked; `longest` bounds the lines that are added in two parts."""
    return jnp.sum(_in_columns(marked, longest), axis=-1, dtype=jnp.int32)


def any_marked(marked: Bool[Array, "*b l"]) -> Bool[Array, "*b"]:
    """Whether any entry of each line is marked."""
    return jnp.any(_in_columns(marked, LONGEST) > 0, axis=-1)


def _in_columns(marked: Bool[Array, "*b l"], longest: int) -> Int[Array, "*b columns"]:
    """How many entries are marked of each column, if a line is written in lines of `WINDOW` entries."""
    *lead, length = marked.shape
    if not WINDOW < length <= longest:
        return marked.astype(jnp.int32)
    lines = -(-length // WINDOW)
    padded = jnp.pad(marked, ((0, 0),) * len(lead) + ((0, lines * WINDOW - length),))
    columns = jnp.sum(padded.reshape(*lead, lines, WINDOW), axis=-2, dtype=jnp.int32)

    # XLA would make one reduction of two that follow each other, and does not know that this changes nothing.
    return jnp.minimum(columns, lines)
