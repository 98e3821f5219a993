"""Reads `forbid`, `allow` and `constraints`: sets of tokens by position, on the host."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from dllm_jax.decoding.checks import CheckedRequest
from dllm_jax.engine.generation import Allowed
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, check_argument, shown
from dllm_jax.samplers import Constraint, OneOf, Sampler
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout

FORMS = (
    "must be Bool[length, vocab], Bool[b, length, vocab], a list with token ids or None per position, or "
    "such a list per sequence"
)
Lists = Sequence[Any]  # per position ids or None, or such a list per sequence
ChoiceTable = Int[np.ndarray, "choices width"]
Choices = list[tuple[int, ChoiceTable]]  # first position and table, of each sequence


def constraints_of(
    given: Constraint | Sequence[Constraint], sampler: Sampler, spec: ModelSpec, layout: Layout
) -> tuple[Constraint, ...]:
    """The constraints of a request; raises ValueError for what is none, or does not fit the canvas."""
    several = [given] if isinstance(given, Constraint) else given
    if not isinstance(several, list | tuple) or not all(
        isinstance(constraint, Constraint) for constraint in several
    ):
        raise ValueError(
            f"constraints={shown(given)} must be a list of Constraint, such as dj.samplers.OneOf(0, words)"
        )
    if several and sampler.procedure.drafts:
        raise ValueError(
            f"constraints= is not supported by {type(sampler).__name__}: they would read the draft that it "
            "verifies. Use forbid and allow, or Autoregressive()"
        )
    for constraint in several:
        constraint.check(spec, layout)
    return tuple(several)


def allowed_tokens(case: CheckedRequest) -> Allowed | None:
    """The sets of allowed tokens of a canvas; None if every token is allowed everywhere.

    Ids that the sampler suppresses join `forbid`. The sets must leave the choices of constraints.

    Raises:
      ValueError: ids outside of the vocabulary, sets of another shape, a mask without an allowed token, a
        choice that is not allowed or contradicts other choices, or an end-of-text that is forbidden where the
        sampler appends it.
    """
    asked, arrays, layout, spec = case.asked, case.arrays, case.layout, case.model.spec
    banned = [*_ids("forbid", asked.forbid, spec), *(asked.sampler.suppress_tokens or ())]
    choices = [constraint for constraint in case.constraints if isinstance(constraint, OneOf)]
    does = asked.sampler.procedure
    if does.grows and not does.shortens and spec.eos_id in banned:
        raise ValueError(
            f"forbid and suppress_tokens must not hold the end-of-text, {spec.eos_id}, which "
            f"{type(asked.sampler).__name__} looks for and appends. Use Threshold(), and a length."
        )
    if asked.allow is None and not banned and not choices:
        return None
    free = np.ones(spec.vocab, bool)
    free[banned] = False
    (batch, length), count = arrays.tokens.shape, layout.end - layout.prompt
    sets, which = _sets(asked.allow, arrays.valid[:, layout.prompt :][:, :count], count, spec)
    which = host.pad(which, layout.prompt, length - layout.prompt - count, -1) + 1
    sets = host.module(sets).concatenate([np.ones((batch, 1, spec.vocab), bool), sets], axis=1) & free

    # Positions that hold a token have no use for their set.
    masked = spec.undecided(arrays.tokens) & arrays.valid
    which = host.module(which, masked).where(masked, which, 0)
    known = [host.readable(array) for array in (sets, which, masked, arrays.tokens)]
    if all(array is not None for array in known):
        canvas = ConstrainedCanvas(*map(np.array, known))
        never = [spec.mask_id] * spec.has_mask_token + [spec.eos_id] * asked.sampler.logits_eos_inf
        canvas.may[:, :, never] = False
        _none_empty(canvas, layout)
        possible = [_possible_choices(choice, canvas, case) for choice in choices]
        _choices_agree(choices, possible, layout)
    return None if asked.allow is None and not banned else Allowed(sets, which.astype(np.int32))


def _sets(
    allow: Any, valid: Bool[AnyArray, "b l"], count: int, spec: ModelSpec
) -> tuple[Bool[AnyArray, "b sets v"], Int[AnyArray, "b count"]]:
    """Different sets of each sequence, and which of them each position has; -1 is free."""
    batch = len(valid)
    if allow is None:
        return np.ones((batch, 0, spec.vocab), bool), np.full((batch, count), -1)
    if isinstance(allow, list | tuple):
        return _of_lists(allow, valid, count, spec)
    rows = host.array("allow", allow, "booleans [length, vocab]")
    given, rows = rows.shape, rows[None] if rows.ndim == 2 else rows
    if rows.dtype != bool or rows.shape[1:] != (count, spec.vocab) or len(rows) not in (1, batch):
        raise ValueError(
            f"allow has shape {given} and dtype {rows.dtype}: it {FORMS}, with length={count} and "
            f"vocab={spec.vocab}"
        )
    if host.readable(rows) is None:  # traced: every position has a set of its own
        return jnp.repeat(rows, batch // len(rows), 0), np.tile(np.arange(count), (batch, 1))
    known = np.broadcast_to(np.asarray(rows), (batch, count, spec.vocab))
    return _together([list(ids) for ids in known], spec)


def _of_lists(allow: Lists, valid: Bool[AnyArray, "b l"], count: int, spec: ModelSpec):
    """The sets of lists, of which each sequence may have its own."""
    nested = lambda item: isinstance(item, list | tuple | np.ndarray)
    by_sequence = any(nested(row) and any(x is None or nested(x) for x in row) for row in allow)
    several = allow if by_sequence else [allow] * len(valid)
    if len(several) != len(valid):
        raise ValueError(f"allow has {len(several)} lists; expected one list per sequence: {len(valid)}")

    # A template with padding on its left may have a list without it.
    real = host.readable(valid)
    lengths = [count] * len(several) if real is None else [int(row.sum()) for row in real]
    rows: list[list[Any]] = []
    for given, size_of in zip(several, lengths, strict=True):
        given = [None] * count if given is None else given
        if not isinstance(given, list | tuple) or len(given) not in (size_of, count):
            size = len(given) if isinstance(given, list | tuple) else shown(given)
            raise ValueError(f"allow has {size} entries: it {FORMS}, with length={size_of}")
        of_ids = [None if ids is None else _set(f"allow[{i}]", ids, spec) for i, ids in enumerate(given)]
        rows.append([None] * (count - len(given)) + of_ids)
    return _together(rows, spec)


def _together(rows: list[list[Any]], spec: ModelSpec):
    """Rows of each position as different sets; with that of all tokens, a power of 2, for few programs."""
    seen = [dict[bytes, int]() for _ in rows]
    which = [
        [
            -1 if row is None else places.setdefault(np.packbits(row).tobytes(), len(places))
            for row in positions
        ]
        for places, positions in zip(seen, rows, strict=True)
    ]
    most = 1 << (max(map(len, seen), default=0)).bit_length()
    sets = np.ones((len(rows), most - 1, spec.vocab), bool)
    for i, places in enumerate(seen):
        for packed, place in places.items():
            bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=spec.vocab)
            sets[i, place] = bits.astype(bool)
    return sets, np.asarray(which)


def _set(name: str, ids: Any, spec: ModelSpec) -> Bool[np.ndarray, "v"]:
    row = np.zeros(spec.vocab, bool)
    row[_ids(name, ids, spec)] = True
    return row


def _ids(name: str, ids: Any, spec: ModelSpec) -> list[int]:
    """Token ids in any order; raises ValueError for others than the vocabulary's."""
    ids = sorted(ids) if isinstance(ids, set | frozenset) else ids
    read = check_argument(name, ids, tuple[NonNegativeInt, ...])
    if outside := [i for i in read if i >= spec.vocab]:
        raise ValueError(f"{name} holds {outside[0]}, outside the vocabulary [0, {spec.vocab})")
    return list(read)


class ConstrainedCanvas(NamedTuple):
    """A canvas on the host.

    Attributes:
      may: Tokens of each set that positions may be unmasked to.
      which: Set of each position.
      masked: Whether each position is to be unmasked.
      tokens: Token ids.
    """

    may: Bool[np.ndarray, "b sets v"]
    which: Int[np.ndarray, "b l"]
    masked: Bool[np.ndarray, "b l"]
    tokens: Int[np.ndarray, "b l"]


def _none_empty(canvas: ConstrainedCanvas, layout: Layout):
    """Raises ValueError if a mask has no token that it may be unmasked to."""
    possible = np.take_along_axis(canvas.may.any(axis=2), canvas.which, axis=1)
    if (empty := np.argwhere(canvas.masked & ~possible)).size:
        sequence, position = empty[0]
        raise ValueError(
            f"allow and forbid leave no token to position {position - layout.prompt} of sequence "
            f"{sequence}: the mask, and ids that the sampler never unmasks, do not count. Allow another "
            "token there, or take one out of forbid"
        )


def _possible_choices(choice: OneOf, canvas: ConstrainedCanvas, case: CheckedRequest) -> Choices:
    """First position and table of the choices that agree with given text, of each sequence.

    Raises:
      ValueError: a choice does not fit the canvas, or holds what the sets rule out.
    """
    table, layout, tables = choice.table(case.model.spec), case.layout, list[tuple[int, ChoiceTable]]()
    for sequence, real in enumerate(case.arrays.valid):
        first = layout.prompt + choice.start + (0 if layout.prompt else int(np.argmax(real)))
        place = np.arange(first, first + table.shape[1])
        if place[-1] >= layout.end:
            raise ValueError(
                f"start={choice.start} and the longest choice, {table.shape[1]} tokens, reach beyond the "
                f"last of {layout.end - layout.prompt} positions. Increase length, or extend the template"
            )
        text, free = canvas.tokens[sequence, place], canvas.masked[sequence, place]
        agrees = np.all(free | (text == table), axis=1)
        if not agrees.any():
            raise ValueError(f"choices={choice.choices} must agree with given text: {text.tolist()} has none")
        sets = canvas.which[sequence, place]
        wrong = agrees & np.any(free & ~canvas.may[sequence, sets, table], axis=1)
        if wrong.any():
            filled = table[np.argmax(wrong)].tolist()
            raise ValueError(
                f"choices hold {choice.choices[np.argmax(wrong)]}, filled up to {filled}, which forbid, "
                "allow or the sampler rule out. Remove the choice"
            )
        tables.append((first, table[agrees]))
    return tables


def _choices_agree(constraints: list[OneOf], possible: list[Choices], layout: Layout):
    """Raises ValueError if a choice agrees with no choice of another constraint at the positions of both.

    Positions are filled from left to right in each text. If every choice agrees with one of each other text,
    a position's token always leaves some to the later ones.

    Args:
      constraints: The constraints.
      possible: First position and choices of each sequence, for each constraint.
      layout: Geometry of the canvas.
    """
    for (i, choice), (j, other) in itertools.permutations(enumerate(possible), 2):
        for (first, table), (start, others) in zip(choice, other, strict=True):
            begin, end = max(first, start), min(first + table.shape[1], start + others.shape[1])
            known = {tuple(row) for row in others[:, begin - start : end - start].tolist()}
            rows = table[:, begin - first : end - first].tolist()
            wrong = [k for k, row in enumerate(rows) if begin < end and tuple(row) not in known]
            if wrong:
                places = f"{begin - layout.prompt} to {end - layout.prompt - 1}"
                raise ValueError(
                    f"choices hold {table[wrong[0]].tolist()} at start={constraints[i].start}, which no "
                    f"choice of OneOf(start={constraints[j].start}) agrees with at positions {places}. "
                    "Remove the choice, or move one of the two"
                )
