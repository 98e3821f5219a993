"""Which half an example belongs to."""

import zlib
from collections.abc import Callable

from dllm_jax.tasks.base import Example, Split


def split_of(example: Example, hold_out: int) -> Split:
    """Held out iff the prompt's checksum is a multiple of `hold_out`."""
    return "train" if zlib.crc32(example.prompt.encode()) % hold_out else "held_out"


def draw(one: Callable[[], Example], split: Split, hold_out: int) -> Example:
    """Draws until an example lies in the half that is wanted."""
    while True:
        example = one()
        if split_of(example, hold_out) == split:
            return example


def check_hold_out(hold_out: int):
    """Refuses a share that leaves nothing to train on.

    Raises:
      ValueError: below 2.
    """
    if hold_out < 2:
        raise ValueError(f"hold_out={hold_out} must be at least 2")
