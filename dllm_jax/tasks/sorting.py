"""Letters in order: `qTbz>` is answered with `bqzT`."""

import dataclasses

import numpy as np
from typing_extensions import override

from dllm_jax.tasks.base import LETTERS, ChecksumSplit, Example


@dataclasses.dataclass(frozen=True)
class Sorting(ChecksumSplit):
    """Different letters put in order, small ones before capitals; the size is their number.

    Each place of the answer depends on the whole prompt. A prompt has size + 1 characters.
    """

    name = "sorting"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer."""
        return size

    @property
    @override
    def _sizes(self) -> tuple[int, float, str]:
        return 2, len(LETTERS), "the number of letters"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """Draws different letters."""
        # The alphabet of `LETTERS` is in order itself, so that places can be sorted instead of letters.
        drawn = rng.choice(len(LETTERS), size, replace=False)
        letters = lambda order: "".join(LETTERS[i] for i in order)
        return Example(f"{letters(drawn)}>", letters(sorted(drawn)))
