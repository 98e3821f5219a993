"""Small tasks in text: key-value recall, a chained look-up, classification by examples, letters in order."""

import dataclasses
import math
from typing import Annotated

import numpy as np
from annotated_types import Interval
from typing_extensions import override

from dllm_jax.options import NonNegativeInt, PositiveInt
from dllm_jax.tasks.base import DIGITS, FILLER, LETTERS, ChecksumSplit, Example


@dataclasses.dataclass(frozen=True)
class Chain(ChecksumSplit):
    """A chained look-up: `c>T;b>c;T>z;...;b>` is answered with `b>c;c>T;T>z;...`, step after step.

    The size is the number of steps, of four characters each.

    The pairs are a ring of `letters` letters in shuffled order, so every letter has one successor, and each
    step of the answer needs the one before. A prompt has 4 letters + 6 values + 2 characters.

    Attributes:
      letters: Number of letters in the ring.
      values: pairs of another kind, `T=407;`, among those of the ring; no step needs them, so that a cache
        may drop them.
    """

    letters: Annotated[int, Interval(ge=2, le=len(LETTERS))] = 16
    values: Annotated[int, Interval(ge=0, le=len(LETTERS))] = 0

    name = "chain"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer."""
        return 4 * size

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


@dataclasses.dataclass(frozen=True)
class FewShot(ChecksumSplit):
    """Classification by examples: `bz:3;Tk:8;bX:3;...;bq:` is answered with `3`.

    The size is the number of examples of each kind.

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
        shuffled = "".join(items[i] for i in rng.permutation(len(items)))
        return Example(shuffled + question, DIGITS[classes[asked]])


@dataclasses.dataclass(frozen=True)
class Sorting(ChecksumSplit):
    """Different letters in order, small ones before capitals: `qTbz>` is answered with `bqzT`.

    The size is their number.

    Each place of the answer depends on the whole prompt. A prompt has size + 1 characters.
    """

    name = "sorting"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer."""
        return size

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
      filler: vowels strewn among the pairs, so that prompts can be long and pairs far apart.
    """

    alphabet: Annotated[int, Interval(ge=2, le=len(LETTERS))] = len(LETTERS)
    digits: PositiveInt = 3
    filler: NonNegativeInt = 0
    asked: PositiveInt = 1

    name = "recall"

    def answer_length(self, size: int) -> int:
        """Number of characters in an answer, whatever the size."""
        return self.digits if self.asked == 1 else self.asked * (self.digits + 3)

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
        chosen = rng.choice(size, self.asked, replace=False)
        form = "".join(f"{keys[i]}={'?' * self.digits};" for i in chosen)
        return Example(self._strewn(rng, pairs) + form, "".join(pairs[i] for i in chosen))

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
      ValueError: too short, or more asked for than there are pairs.
    """
    task = Recall(asked=asked)
    if tokens < (shortest := max(SHORTEST, SPARSER * asked if asked > 1 else 0)):
        raise ValueError(f"tokens={tokens} must be at least {shortest}")
    if asked > len(LETTERS):
        raise ValueError(f"asked={asked} must be at most {len(LETTERS)}, the pairs that there are")
    # What the template, the question and the pairs leave of the length is filler.
    pairs = min(tokens // (8 if asked == 1 else SPARSER), len(LETTERS))
    of_pair = task.digits + 3
    question = 2 if asked == 1 else asked * of_pair
    return dataclasses.replace(task, filler=tokens - TEMPLATE_TOKENS - pairs * of_pair - question), pairs


def asked_pair(example: Example) -> int:
    """Finds the index, from 0, of the pair that a recall prompt of one key asks for."""
    *pairs, asked = (part.split("=")[0].strip(FILLER) for part in example.prompt.split(";"))
    return pairs.index(asked)
