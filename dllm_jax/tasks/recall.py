"""Key-value recall, a needle in a haystack: `b=407;aouT=211;...;T=` is answered with `211`."""

import dataclasses
from typing import Annotated

import numpy as np
from annotated_types import Interval
from typing_extensions import override

from dllm_jax.options import NonNegativeInt, PositiveInt
from dllm_jax.tasks.base import DIGITS, FILLER, LETTERS, ChecksumSplit, Example

TEMPLATE_TOKENS = 10  # of the chat template around a prompt
SPARSER = 16  # tokens to a pair where several are asked for
SHORTEST = 42  # tokens of a needle's prompt: below, one pair to eight tokens does not fit


@dataclasses.dataclass(frozen=True)
class Recall(ChecksumSplit):
    """Look-up among distractors; the size is the number of pairs, each asked for with equal probability.

    Keys are distinct letters. A prompt of n pairs has n (3 + digits) + 2 + filler characters. No held-out
    prompt is ever trained on, see `ChecksumSplit`.

    Several keys are asked for by a form, which the answer fills in: `b=407;T=211;...;T=???;z=???;` is
    answered with `T=211;z=830;`. The prompt has n (3 + digits) + asked (3 + digits) + filler characters then.

    Attributes:
      alphabet: Number of different letters in keys.
      digits: length of a value.
      asked: Number of pairs that are asked for.
      filler: vowels strewn between the pairs, so that prompts can be long and pairs far apart.
    """

    alphabet: Annotated[int, Interval(ge=2, le=len(LETTERS))] = len(LETTERS)
    digits: PositiveInt = 3
    filler: NonNegativeInt = 0
    asked: PositiveInt = 1

    name = "recall"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer, whatever the size."""
        return self.digits if self.asked == 1 else self.asked * (self.digits + 3)

    @property
    @override
    def _sizes(self) -> tuple[int, float, str]:
        return self.asked, self.alphabet, "from what is asked for to the number of keys"

    @override
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """Draws `size` pairs and asks for one, or some, of them."""
        # Distinct keys, values of any digits: which pair is asked for does not follow from the others.
        keys = [LETTERS[i] for i in rng.choice(self.alphabet, size, replace=False)]
        drawn = rng.integers(len(DIGITS), size=(size, self.digits))
        values = ["".join(DIGITS[i] for i in digits) for digits in drawn]
        pairs = [f"{key}={value};" for key, value in zip(keys, values, strict=True)]
        if self.asked == 1:
            asked = int(rng.integers(size))
            return Example(f"{self._strewn(rng, pairs)}{keys[asked]}=", values[asked])
        # Several: the answer is the form filled in, in the order of the form, not of the prompt.
        some = rng.choice(size, self.asked, replace=False)
        form = "".join(f"{keys[i]}={'?' * self.digits};" for i in some)
        return Example(self._strewn(rng, pairs) + form, "".join(pairs[i] for i in some))

    def _strewn(self, rng: np.random.Generator, pairs: list[str]) -> str:
        """The pairs in order, with filler before, between and after them."""
        # How much filler goes before, between and after the pairs; all places are as likely.
        gaps = rng.multinomial(self.filler, np.full(len(pairs) + 1, 1 / (len(pairs) + 1)))
        vowels = "".join(FILLER[i] for i in rng.integers(len(FILLER), size=self.filler))
        ends = np.cumsum(gaps)
        runs = [vowels[end - gap : end] for gap, end in zip(gaps, ends, strict=True)]
        return "".join(run + pair for run, pair in zip(runs, [*pairs, ""], strict=True))


def needle(tokens: int, asked: int = 1) -> tuple[Recall, int]:
    """The recall task and its size whose prompts have so many tokens with the bundled models' template.

    One pair to eight tokens, or to sixteen if several are asked for; 40 pairs at most; the rest is filler.

    Raises:
      ValueError: too short.
    """
    task = Recall(asked=asked)
    if tokens < (shortest := max(SHORTEST, SPARSER * asked if asked > 1 else 0)):
        raise ValueError(f"tokens={tokens} must be at least {shortest}")
    # What the template, the question and the pairs leave of the length is filler.
    pairs = min(tokens // (8 if asked == 1 else SPARSER), len(LETTERS))
    of_pair = task.digits + 3
    question = 2 if asked == 1 else asked * of_pair
    return dataclasses.replace(task, filler=tokens - TEMPLATE_TOKENS - pairs * of_pair - question), pairs


def asked_pair(example: Example) -> int:
    """Finds the index, from 0, of the pair that a recall prompt asks for."""
    *pairs, asked = (part.split("=")[0].strip(FILLER) for part in example.prompt.split(";"))
    return pairs.index(asked)
