"""Classification by examples: `bz:3;Tk:8;bX:3;...;bq:` is answered with `3`."""

import dataclasses
import math
from typing import Annotated

import numpy as np
from annotated_types import Interval
from typing_extensions import override

from dllm_jax.options import NonNegativeInt
from dllm_jax.tasks.base import DIGITS, LETTERS, ChecksumSplit, Example


@dataclasses.dataclass(frozen=True)
class FewShot(ChecksumSplit):
    """Which class does a new item belong to? The size is the number of examples of each kind.

    An item is two letters: the first decides its class, the second means nothing. Each prompt has its own
    kinds and classes. Some examples of a kind carry a wrong class, so the answer is what most examples of
    the kind say. A prompt has 5 kinds size + 3 characters.

    Attributes:
      kinds: different first letters in a prompt; their classes are distinct.
      wrong: examples of each kind with a wrong class; fewer than half.
    """

    kinds: Annotated[int, Interval(ge=2, lt=len(DIGITS))] = 4
    wrong: NonNegativeInt = 1

    name = "few-shot"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer, whatever the size."""
        return 1

    @property
    @override
    def _sizes(self) -> tuple[int, float, str]:
        return 2 * self.wrong + 1, math.inf, f"above twice wrong={self.wrong}"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """Draws `size` examples of each kind, in random order, and a new item of one of them."""
        # A first letter decides the class of an item; kinds and their classes are new in every prompt.
        kinds = [LETTERS[i] for i in rng.choice(len(LETTERS), self.kinds, replace=False)]
        classes = rng.choice(len(DIGITS), self.kinds, replace=False)
        items = []
        for kind, right in zip(kinds, classes, strict=True):
            # Wrong classes are any but the right one, and outvoted by it within their kind.
            wrong = (right + rng.integers(1, len(DIGITS), size=self.wrong)) % len(DIGITS)
            shown = [*wrong, *[right] * (size - self.wrong)]
            items += [f"{kind}{LETTERS[rng.integers(len(LETTERS))]}:{DIGITS[i]};" for i in shown]
        # The question is one more item of a kind, whose second letter means nothing.
        asked = int(rng.integers(self.kinds))
        question = f"{kinds[asked]}{LETTERS[rng.integers(len(LETTERS))]}:"
        return Example(
            "".join(items[i] for i in rng.permutation(len(items))) + question, DIGITS[classes[asked]]
        )
