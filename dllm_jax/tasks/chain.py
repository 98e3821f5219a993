"""A chained look-up: `c>T;b>c;T>b;...;b>` is answered with `b>c;c>T;T>b;...`, step after step."""

import dataclasses
from typing import Annotated

import numpy as np
from annotated_types import Interval
from typing_extensions import override

from dllm_jax.tasks.base import LETTERS, ChecksumSplit, Example


@dataclasses.dataclass(frozen=True)
class Chain(ChecksumSplit):
    """A derivation written out; the size is the number of steps, of four characters each.

    The pairs are a ring of `letters` letters in shuffled order, so every letter has one successor, and each
    step of the answer needs the one before. A prompt has 4 letters + 6 values + 2 characters.

    Attributes:
      letters: of the ring.
      values: pairs of another kind, `T=407;`, between those of the ring; no step needs them, so that a cache
        may drop them.
    """

    letters: Annotated[int, Interval(ge=2, le=len(LETTERS))] = 16
    values: Annotated[int, Interval(ge=0, le=len(LETTERS))] = 0

    name = "chain"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer."""
        return 4 * size

    @property
    @override
    def _sizes(self) -> tuple[int, float, str]:
        return 1, self.letters, "the letters of the ring"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """Draws a ring and asks for the `size` steps from one of them on."""
        # Every letter has one successor, and one of them begins; the pairs say so in shuffled order.
        ring = [LETTERS[i] for i in rng.choice(len(LETTERS), self.letters, replace=False)]
        pairs = [f"{ring[i - 1]}>{ring[i]};" for i in rng.permutation(self.letters)]
        # Distractors that no step of the walk needs, mixed in among the pairs.
        if self.values:
            keys = [LETTERS[i] for i in rng.choice(len(LETTERS), self.values, replace=False)]
            pairs += [f"{key}={rng.integers(1000):03};" for key in keys]
            pairs = [pairs[i] for i in rng.permutation(len(pairs))]
        # The derivation: each step begins with the letter at which the one before ended.
        steps = [f"{ring[i]}>{ring[(i + 1) % self.letters]};" for i in range(size)]
        return Example(f"{''.join(pairs)}{ring[0]}>", "".join(steps))
