"""Streams of a sequence, side by side: the conditional one, and with guidance the unconditional one."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

Streamed = TypeVar("Streamed")  # an array or a pytree of them


def repeat(tree: Streamed, streams: int) -> Streamed:
    """Arrays of sequences with each sequence once per stream (conditional and unconditional, for guidance).

    The streams of a sequence are neighbours: over a mesh, they lie on the same devices.
    """
    if streams == 1:
        return tree
    return jax.tree.map(lambda a: jnp.repeat(a, streams, axis=0), tree)


def one_stream(array: Shaped[Array, "streams_b ..."], index: int, streams: int) -> Shaped[Array, "b ..."]:
    """One of the streams that `repeat` put side by side, 0 the conditional one."""
    if streams == 1:
        return array
    return array.reshape(-1, streams, *array.shape[1:])[:, index]
