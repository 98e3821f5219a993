"""Trace of one sequence as arrays on the host, from which pictures are drawn."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from dllm_jax.engine.features.trace import Trace
from dllm_jax.options import check_argument, shown
from dllm_jax.state.host import everywhere
from dllm_jax.state.inputs import EMBEDS_PLACEHOLDER
from dllm_jax.state.text import check_members, decode

ABSENT = -3  # shown for a token that an answer does not have yet (`Trace.length`)
NO_ID = -2  # neither a token nor an input of a prompt with embeddings
GIVEN = "▦"  # an input of a prompt with embeddings, which has no text
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # of bytes that are no whole character


@dataclasses.dataclass(frozen=True)
class Recording:
    """The denoising steps in which one sequence took part; t of them, over a canvas of l positions.

    Attributes:
      tokens: before its first step and after each one.
      computed: positions that each step fed through the network.
      read: positions that those attended to.
      proposed: candidate token of each scored position, mask_id elsewhere.
      score: its confidence, -inf elsewhere.
      widened: layers that each step ran over all positions, be they in `computed` or not (Elastic-Cache).
      mask_id: the id of undecided positions.
      source: Position at which each position was before each step; None where none moves.
    """

    tokens: Int[np.ndarray, "t_plus_1 l"]
    computed: Bool[np.ndarray, "t l"]
    read: Bool[np.ndarray, "t l"]
    proposed: Int[np.ndarray, "t l"]
    score: Float[np.ndarray, "t l"]
    widened: Bool[np.ndarray, "t n"]
    mask_id: int
    source: Int[np.ndarray, "t l"] | None = None

    @classmethod
    def of(cls, trace: Trace | None, sequence: int) -> "Recording":
        """The recording of one sequence of a batch.

        Raises:
          ValueError: nothing was recorded, the trace is traced or mapped (`jax.vmap`), or there is no such
            sequence.
        """
        if trace is None:
            raise ValueError("the output holds no trace: ask for it with generate(..., trace=True)")
        if any(isinstance(part, Tracer) for part in trace):
            raise ValueError("a picture needs values: draw it outside of jit and vmap")
        if trace.tokens.ndim != 3:
            raise ValueError(
                f"trace.tokens has shape {trace.tokens.shape}; expected [t+1, b, l]: draw the outputs of a "
                "mapped program (jax.vmap) one by one"
            )
        batch = trace.tokens.shape[1]
        if not 0 <= check_argument("sequence", sequence, int) < batch:
            raise ValueError(f"sequence={shown(sequence)} must be 0 to {batch - 1}: the batch has {batch}")

        # A trace that was made inside of jit has room for more steps than ran, and one of a batch has as many
        # as its slowest sequence took.
        steps = np.flatnonzero(everywhere(trace.active)[: int(everywhere(trace.steps)), sequence])
        before_and_after = np.concatenate([[0], steps + 1])
        names = "computed", "read", "proposed", "score", "widened"
        of_steps = {name: everywhere(getattr(trace, name))[steps, sequence] for name in names}
        mask_id = _mask_id(trace, inserted := _inserted(trace))
        recording = cls(everywhere(trace.tokens)[before_and_after, sequence], **of_steps, mask_id=mask_id)
        if trace.end is None or inserted is None:
            return recording
        end = everywhere(trace.end)[before_and_after, sequence]
        moved, removed = (everywhere(a)[steps, sequence] for a in (trace.moved, trace.removed))
        return recording.grown(end, inserted[steps, sequence], moved, removed)

    def grown(
        self,
        end: Int[np.ndarray, " t_plus_1"],
        inserted: Int[np.ndarray, "t"],
        moved: Int[np.ndarray, "t"],
        removed: Bool[np.ndarray, "t l"],
    ) -> "Recording":
        """The recording of an answer that grew: each step in the positions that it leaves.

        Args:
          end: Position after the answer, before the first step and after each.
          inserted: Mask that became several in each step; -1 where none did.
          moved: Number of positions by which what follows it moved.
          removed: Positions that each step removed.
        """
        position = np.arange(int(end.max()))
        tokens = self.tokens[:, : len(position)].copy()
        tokens[position >= end[:, None]] = ABSENT
        after = inserted[:, None]
        behind = (inserted >= 0)[:, None] & (position > after)
        left = np.argsort(removed, axis=1, kind="stable")[:, : len(position)]  # what stays comes first
        source = np.where(behind, position - moved[:, None], left)
        new = behind & (position <= after + moved[:, None])
        at = lambda array, none: np.where(new, none, np.take_along_axis(array, np.maximum(source, 0), axis=1))
        return dataclasses.replace(
            self,
            tokens=tokens,
            computed=at(self.computed, False),
            read=at(self.read, False),
            proposed=at(self.proposed, self.mask_id),
            score=at(self.score, -np.inf),
            source=np.clip(source, 0, len(position) - 1),
        )

    @property
    def steps(self) -> int:
        """Denoising steps of the sequence."""
        return len(self.computed)

    @property
    def undecided(self) -> Bool[np.ndarray, "t_plus_1 l"]:
        """Positions without a token before the first step and after each one."""
        return self.tokens == self.mask_id

    @property
    def to_fill(self) -> Int[np.ndarray, "r"]:
        """Positions that were masked at first: the response, or what `infill` fills.

        Of answers that grow all from the first mask on, whose text may move.
        """
        masks = self.undecided[0]
        return np.flatnonzero(np.maximum.accumulate(masks) if ABSENT in self.tokens else masks)

    @property
    def changed(self) -> Bool[np.ndarray, "t l"]:
        """Positions whose token each step decoded, made a mask again, or moved."""
        return self.tokens[1:] != self.tokens[:-1]

    @property
    def by_entropy(self) -> bool:
        """Whether scores are negative entropies, whose exponential is a confidence from 0 to 1."""
        return bool(np.any(np.isfinite(self.score) & (self.score < 0)))

    @property
    def unmasked(self) -> tuple[Int[np.ndarray, "t_plus_1 l"], Float[np.ndarray, "t_plus_1 l"]]:
        """The step, from 1, that decoded what stands at each position before and after steps, and its score.

        Step 0 and score -inf where none did. What was made a mask again and decoded once more counts from the
        last time.
        """
        at, score = np.zeros(self.tokens.shape, int), np.full(self.tokens.shape, -np.inf, np.float32)
        for step, after in enumerate(self.tokens[1:]):
            source = slice(None) if self.source is None else self.source[step]
            new, there = after != self.tokens[step][source], ~self.undecided[step + 1] & (after != ABSENT)
            at[step + 1] = np.where(there, np.where(new, step + 1, at[step][source]), 0)
            score[step + 1] = np.where(there, np.where(new, self.score[step], score[step][source]), -np.inf)
        return at, score

    @property
    def decoded_at(self) -> Int[np.ndarray, "l"]:
        """The step, from 1, that decoded what stands at a position at the end; 0 where none did."""
        return self.unmasked[0][-1]

    @property
    def age(self) -> Int[np.ndarray, "t l"]:
        """Steps since what a step reads of a position was computed: 0 where it computes it itself.

        -1 where no step has computed it yet. In layers that widened it may be less.
        """
        step = np.arange(self.steps)[:, None]
        last = np.maximum.accumulate(np.where(self.computed, step, -1), axis=0)
        return np.where(last < 0, -1, step - last)


def _inserted(trace: Trace) -> Int[np.ndarray, "t b"] | None:
    """Position of the mask that became several in each step, -1 where none did; None if no answer grew."""
    if trace.end is None or trace.length is None:
        return None
    start, inserted = everywhere(trace.end)[0] - everywhere(trace.length)[0], everywhere(trace.inserted)
    return np.where(inserted < 0, -1, start + inserted)


def _mask_id(trace: Trace, inserted: np.ndarray | None) -> int:
    """The mask token, which an output does not name: what positions held that a step decoded.

    Or what became several, where the first change is that others moved. If nothing was decoded it stands
    where no candidate was proposed; NO_ID if there is no such position.
    """
    tokens = everywhere(trace.tokens)
    step, sequence, position = np.nonzero(tokens[1:] != tokens[:-1])
    if len(step):
        at = -1 if inserted is None else inserted[step[0], sequence[0]]
        return int(tokens[step[0], sequence[0], position[0] if at < 0 else at])
    unscored = everywhere(trace.proposed)[np.isneginf(everywhere(trace.score))]
    return int(unscored[0]) if len(unscored) else NO_ID


class TextPiece(NamedTuple):
    """A token as people read it.

    Attributes:
      text: its characters; for a token that is a part of one, what the tokenizer calls it.
      special: whether it is a special token, such as end-of-text.
    """

    text: str
    special: bool


def pieces(tokenizer: Any, ids: Iterable[int]) -> dict[int, TextPiece]:
    """Tokens as text, by id; None for a tokenizer gives the ids themselves.

    Raises:
      ValueError: the tokenizer is none of transformers' kind.
    """
    ids = list(ids)

    # A place of embeddings, or of nothing, holds no token that a tokenizer could decode.
    no_tokens = {EMBEDS_PLACEHOLDER: TextPiece(GIVEN, False), ABSENT: TextPiece("", False)}
    given = {i: no_tokens[i] for i in ids if i in no_tokens}
    ids = [i for i in ids if i not in no_tokens]
    if tokenizer is None:
        return given | {i: TextPiece(str(i), False) for i in ids}
    check_members(tokenizer, "decode", "convert_ids_to_tokens", "all_special_ids")
    special = set(tokenizer.all_special_ids)
    return given | {i: TextPiece(_text(tokenizer, i), i in special) for i in ids}


def _text(tokenizer: Any, token: int) -> str:
    """Decodes a token; returns its name if it decodes to nothing or to a part of a character.

    A checkpoint may have more embeddings than its tokenizer has tokens, which have no name.
    """
    text = decode(tokenizer, [token], special=True)
    if text and REPLACEMENT not in text:
        return text
    return str(tokenizer.convert_ids_to_tokens(token) or f"[{token}]")


def printable(text: str) -> str:
    """The text on one line, without characters that a terminal would obey."""
    return harmless(text.translate({ord("\n"): "⏎", ord("\t"): "→", ord(" "): "␣"}))


def harmless(text: str) -> str:
    """The text without characters that a terminal would obey, but for the ends of lines and tabs."""
    is_shown = lambda c: c.isprintable() or c in "\n\t"
    return "".join(c if is_shown(c) else c.encode("unicode_escape").decode() for c in text)
