"""Letters in order: `qTbz>` is answered with `bqzT`."""

import dataclasses

import numpy as np
from typing_extensions import override

from dllm_jax.tasks.base import LETTERS, ChecksumSplit, Example, HoldOut


@dataclasses.dataclass(frozen=True)
class Sorting(ChecksumSplit):
    """Different letters put in order, small ones before capitals; the size is their number.

    Each place of the answer depends on the whole prompt. A prompt has size + 1 characters.

    Attributes:
      hold_out: one prompt in `hold_out` is held out.
    """

    hold_out: HoldOut = 8

    name = "sorting"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer."""
        return size

    @override
    def _check_size(self, size: int):
        if not 2 <= size <= len(LETTERS):
            raise ValueError(f"size={size} must lie in [2, {len(LETTERS)}], the number of letters")

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """Draws different letters."""
        drawn = rng.choice(len(LETTERS), size, replace=False)
        letters = lambda order: "".join(LETTERS[i] for i in order)
        return Example(f"{letters(drawn)}>", letters(sorted(drawn)))
