"""A chained look-up: `c>T;b>c;T>b;...;b>` is answered with `b>c;c>T;T>b;...`, step after step."""

import dataclasses

import numpy as np

from dllm_jax.tasks.alphabet import LETTERS
from dllm_jax.tasks.base import Example
from dllm_jax.tasks.splits import HeldOut


@dataclasses.dataclass(frozen=True)
class Chain(HeldOut):
    """A derivation written out; the size is the number of steps, of four characters each.

    The pairs are a ring of `letters` letters in shuffled order, so every letter has one successor, and each
    step of the answer needs the one before. A prompt has 4 letters + 2 characters.

    Attributes:
      letters: of the ring.
      hold_out: one prompt in `hold_out` is held out.
    """

    letters: int = 16
    hold_out: int = 8

    name = "chain"

    def __post_init__(self):
        if not 2 <= self.letters <= len(LETTERS):
            raise ValueError(f"letters={self.letters} must lie in [2, {len(LETTERS)}]")
        super().__post_init__()

    def answer_length(self, size: int) -> int:
        """Characters of an answer."""
        return 4 * size

    def _check_size(self, size: int):
        if not 1 <= size <= self.letters:
            raise ValueError(f"size={size} must lie in [1, {self.letters}], the letters of the ring")

    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """Draws a ring and asks for the `size` steps from one of them on."""
        ring = [LETTERS[i] for i in rng.choice(len(LETTERS), self.letters, replace=False)]
        pairs = [f"{ring[i - 1]}>{ring[i]};" for i in rng.permutation(self.letters)]
        steps = [f"{ring[i]}>{ring[(i + 1) % self.letters]};" for i in range(size)]
        return Example(f"{''.join(pairs)}{ring[0]}>", "".join(steps))
