"""PC-Sampler: confidence calibrated by how common a token is, from left to right (arXiv:2508.13021)."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import Arrays, TracedNonNegativeFloat, TracedPositiveFloat, shown
from dllm_jax.samplers.candidates import Candidates, Ids, Logits, Noise, Scores
from dllm_jax.samplers.confidence import FixedSchedule
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best


class TokenFrequencies(Arrays):
    """Table of token frequencies in a corpus, as fractions of all its tokens.

    Hashable by its numbers, and a pytree with them as one leaf: programs take the table as an argument.

    Attributes:
      values: Frequencies, float32 [v].
      source: File that they were read from; None for others.
    """

    leaves = ("values",)
    values: Float[Array, "v"] | np.ndarray
    source: str | None = None

    def __init__(self, frequencies: Any, sha256: str | None = None):
        """Checks a table.

        Args:
          frequencies: numbers in [0, 1] by token id, not all 0; or the path of a .npy file that holds them.
          sha256: Expected sha256 of the numbers as float32, or its first digits; None accepts any numbers.

        Raises:
          ValueError: they are no such numbers, or others than `sha256` says.
          OSError: the file cannot be read.
        """
        # Inside of a program there are no numbers to check or to hash.
        if isinstance(frequencies, Tracer):
            self.values = frequencies
            return
        table = frequencies
        if isinstance(frequencies, str | os.PathLike):
            self.source = os.fspath(frequencies)
            table = _read(self.source)
        table = np.asarray(table)
        if table.ndim != 1 or not table.size or not np.issubdtype(table.dtype, np.number):
            raise ValueError(f"frequencies={shown(frequencies)} must be numbers by token id, one-dimensional")
        if not (np.isfinite(table) & (table >= 0) & (table <= 1)).all() or not table.any():
            wrong = np.flatnonzero(~((table >= 0) & (table <= 1)))
            where = f"; that of token {wrong[0]} is {table[wrong[0]]}" if len(wrong) else ""
            raise ValueError(f"frequencies must be in [0, 1] and not all 0{where}: for counts, see of_counts")
        self.values = table.astype(np.float32)
        if sha256 is not None and not self.sha256.startswith(sha256):
            raise ValueError(f"sha256={shown(sha256)}: the frequencies have {self.sha256}")

    @classmethod
    def of_counts(cls, counts: Mapping[int, int], vocab: int) -> "TokenFrequencies":
        """The table of counted tokens; a token that was never seen counts once, as in the released code.

        Args:
          counts: occurrences by token id.
          vocab: size of the vocabulary.

        Raises:
          ValueError: an id outside of the vocabulary, a negative count, or nothing counted.
        """
        total = sum(counts.values())
        for token, count in counts.items():
            if not 0 <= token < vocab or count < 0:
                raise ValueError(
                    f"counts[{token}]={count}: expected ids in 0..{vocab - 1}, counts of at least 0"
                )
        if total == 0:
            raise ValueError(f"counts={shown(counts)} holds no occurrence of any token")
        seen = np.ones(vocab)
        for token, count in counts.items():
            seen[token] = max(count, 1)
        return cls(seen / total)

    def __repr__(self) -> str:
        if isinstance(self.values, Tracer) or not isinstance(self.values, np.ndarray | jax.Array):
            return "TokenFrequencies(<traced>)"
        source = self.source or f"<{self.values.size} tokens>"
        return f"TokenFrequencies({source!r}, sha256={self.sha256[:16]!r})"


def _read(path: str) -> np.ndarray:
    """The array of a .npy file.

    Raises:
      ValueError: it holds no array.
      OSError: it cannot be read.
    """
    try:
        table = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file: {error}") from error
    if not isinstance(table, np.ndarray):
        raise ValueError(f"{path} is an archive of arrays; expected a .npy file")
    return table


@dataclasses.dataclass(frozen=True)
class PCSampler(FixedSchedule):
    """Unmasks confident and uncommon tokens first, from left to right (PC-Sampler).

    The confidence is min(-p ln(f + 1e-10), clip), with p the probability of the selected token and f its
    frequency in a corpus, because common tokens such as full stops are confident early. The order is that of
    exp(-decay i) times the confidence at position i.

    With decay=0, frequencies of 1 / v each and a clip above ln(v) the order is that of `Confidence()`.

    Attributes:
      frequencies: Frequencies of the tokens of the model's vocabulary (`TokenFrequencies`).
      decay: Decay lambda per position. The paper uses 0.25, 0 for Sudoku and 0.5 for Countdown.
      clip: Maximum confidence alpha, in nats.
    """

    frequencies: TokenFrequencies
    decay: TracedNonNegativeFloat = 0.25
    clip: TracedPositiveFloat = 10.0

    @override
    def check_model(self, spec: ModelSpec):
        super().check_model(spec)
        tokens = np.shape(self.frequencies.values)[-1]
        if tokens != spec.vocab:
            raise ValueError(f"frequencies of {tokens} tokens do not fit a vocabulary of {spec.vocab}")

    @override
    def confidence(
        self, logits: Logits, token: Ids, index: Ids, canvas: Canvas, noise: Noise | None
    ) -> Scores:
        """The probability of the token times its information in the corpus, clipped; in nats."""
        probability = super().confidence(logits, token, index, canvas, noise)

        # In nats. d2Cache's 1e-10 (the authors' 1e-9) keeps it finite for a token that the corpus lacks.
        information = -jnp.log(jnp.asarray(self.frequencies.values)[token] + 1e-10)
        return jnp.minimum(probability * information, self.clip)

    @override
    def transfer(self, candidates: Candidates, canvas: Canvas, noise: Noise | None) -> Bool[Array, "b c"]:
        """As many as the schedule wants, by confidence times exp(-decay i)."""
        # Counted from the leftmost candidate: the same order as from the start of the response, where
        # exp(-0.25 i) is 0 in float32 after some 350 positions.
        score, index = candidates.score, candidates.index
        candidate = score > -jnp.inf
        leftmost = jnp.min(jnp.where(candidate, index, canvas.layout.length), axis=1, keepdims=True)
        weight = jnp.exp(-self.decay * (index - leftmost).astype(jnp.float32))
        return best(jnp.where(candidate, weight * score, -jnp.inf), self.count(canvas))
