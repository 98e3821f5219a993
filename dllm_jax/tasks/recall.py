"""Key-value recall: `b=w;t=m;...;t=` is answered with `m`."""

import dataclasses
import zlib

import numpy as np

from dllm_jax.tasks.base import Example, Split

LETTERS = "bcdfghjklmnpqrstvwxz"  # no vowels: no accidental words
FILLER = "aeiou"


@dataclasses.dataclass(frozen=True)
class Recall:
    """Look-up among distractors; the size is the number of pairs.

    Keys are distinct. A prompt is held out iff its checksum is a multiple of `hold_out`, so no held-out
    prompt is ever trained on.

    Attributes:
      key: letters of a key.
      alphabet: how many different letters occur in keys.
      values: lengths of values, dealt in this order and then shuffled, so that the size fixes the length of
        the prompt; by default 4 n + 2 characters for n pairs.
      filler: vowels strewn between the pairs, so that prompts can be long and pairs far apart.
      hold_out: one prompt in `hold_out` is held out.
    """

    key: int = 1
    alphabet: int = len(LETTERS)
    values: tuple[int, ...] = (1,)
    filler: int = 0
    hold_out: int = 8

    def __post_init__(self):
        if not 1 <= self.key <= 3:
            raise ValueError(f"key={self.key} must lie in [1, 3]")
        if not 2 <= self.alphabet <= len(LETTERS):
            raise ValueError(f"alphabet={self.alphabet} must lie in [2, {len(LETTERS)}]")
        if not self.values or min(self.values) < 1:
            raise ValueError(f"values={self.values} must be one or more positive lengths")
        if self.filler < 0:
            raise ValueError(f"filler={self.filler} must not be negative")
        if self.hold_out < 2:
            raise ValueError(f"hold_out={self.hold_out} must be at least 2")

    @property
    def name(self) -> str:
        """For tables."""
        return "recall"

    @property
    def answer_length(self) -> int:
        """Most characters of an answer."""
        return max(self.values)

    def example(self, rng: np.random.Generator, size: int, split: Split) -> Example:
        """Draws `size` pairs and asks for one of them."""
        most = self.alphabet**self.key
        if not 1 <= size <= most:
            raise ValueError(f"size={size} must lie in [1, {most}], the number of keys")
        while True:
            example = self._draw(rng, size, most)
            if self.split_of(example) == split:
                return example

    def split_of(self, example: Example) -> Split:
        """By the checksum of the prompt."""
        return "train" if zlib.crc32(example.prompt.encode()) % self.hold_out else "held_out"

    def _draw(self, rng: np.random.Generator, size: int, most: int) -> Example:
        keys = rng.choice(most, size, replace=False)
        lengths = rng.permutation([self.values[i % len(self.values)] for i in range(size)])
        asked = int(rng.integers(size))
        values = ["".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=n)) for n in lengths]
        names = [self._name(int(key)) for key in keys]
        pairs = [f"{name}={value};" for name, value in zip(names, values, strict=True)]
        return Example(f"{self._strewn(rng, pairs)}{names[asked]}=", values[asked])

    def _strewn(self, rng: np.random.Generator, pairs: list[str]) -> str:
        """The pairs in order, with filler before, between and after them."""
        if not self.filler:
            return "".join(pairs)
        gaps = rng.multinomial(self.filler, np.full(len(pairs) + 1, 1 / (len(pairs) + 1)))
        vowels = "".join(FILLER[i] for i in rng.integers(len(FILLER), size=self.filler))
        ends = np.cumsum(gaps)
        runs = [vowels[end - gap : end] for gap, end in zip(gaps, ends, strict=True)]
        return "".join(run + pair for run, pair in zip(runs, [*pairs, ""], strict=True))

    def _name(self, number: int) -> str:
        """The number in base `alphabet`, written in letters."""
        digits = (number // self.alphabet**place for place in reversed(range(self.key)))
        return "".join(LETTERS[digit % self.alphabet] for digit in digits)
