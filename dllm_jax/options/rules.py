"""The rule that an annotation states: valid values, as they are stored and as messages say it; and paths."""

import contextlib
import dataclasses
import errno
import functools
import math
import numbers
import operator
import os
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

import annotated_types
import jax
import numpy as np
from annotated_types import Ge, Gt, Interval, Le, Lt, MinLen
from jax.core import Tracer
from jaxtyping import AbstractArray

from dllm_jax.traced import Count, Number, Traced, argument, fixed_at, scalar


@dataclasses.dataclass(frozen=True)
class Odd:
    """Marks a whole number that must be odd."""


@dataclasses.dataclass(frozen=True)
class Int32:
    """Marks a whole number that programs hold in 32 bits, with a sign: it is below 2**31."""


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Marks a tuple that holds one value per layer of the model, first layer first."""


@dataclasses.dataclass(frozen=True)
class NoneMeans:
    """Marks what None stands for, for the error message: `NoneMeans("never")`."""

    meaning: str


# Whole numbers end up in int32 arrays. Another value of a traced number compiles nothing again.
PositiveInt = Annotated[int, Ge(1), Int32()]
NonNegativeInt = Annotated[int, Ge(0), Int32()]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
TracedPositiveInt = Annotated[Count, Ge(1), Int32(), Traced()]
TracedNonNegativeInt = Annotated[Count, Ge(0), Int32(), Traced()]
TracedPositiveFloat = Annotated[Number, Gt(0), Traced()]
TracedNonNegativeFloat = Annotated[Number, Ge(0), Traced()]
TracedWidth = Annotated[Number, Ge(1e-18), Traced()]  # of a Gaussian: its square is not 0 in float32
TracedFraction = Annotated[Number, Interval(ge=0, le=1), Traced()]
TracedUnlessZero = Annotated[Number, Ge(0), Traced(unless=0)]
Seed = Annotated[int, Interval(ge=0, lt=2**32)]  # of a random key, which has no more bits
Profile = Annotated[tuple[float, ...], MinLen(1), PerLayer()]


SHOWN = 500  # characters of a value in an error message
UNIONS = typing.Union, types.UnionType
MARKS = annotated_types.BaseMetadata, Odd, Int32, PerLayer, NoneMeans, Traced  # all others are left out
INT32, FLOAT32 = 2**31, np.finfo(np.float32)
SMALLEST, LARGEST = float(FLOAT32.smallest_normal), float(FLOAT32.max)  # positive numbers that float32 holds


def check_argument(name: str, value: Any, annotation: Any, example: str = "") -> Any:
    """Checks an argument of a function as if it were a field: `check_argument("batch", batch, PositiveInt)`.

    Args:
      name: Name of the argument.
      value: Value to check.
      annotation: Annotation of a kind that `dllm_jax.options` lists.
      example: End of the message for a class, which names an instance: ", such as Confidence()".

    Returns:
      the value as a field holds it: Python's number for one of NumPy, a tuple for a list or an array.

    Raises:
      ValueError: a value outside of the annotation.
      TypeError: an annotation that is none of the kinds, or a mark that does not apply to its kind.
    """
    rule = rule_of(annotation, example)
    if rule is None:
        raise TypeError(f"{annotation} is no kind of option")
    return rule.check(name, value)


class Rule(NamedTuple):
    """The values that one field takes.

    Attributes:
      read: the value as it is stored; raises ValueError for one that is refused.
      words: describes the valid values, after "must be".
      argument: the value as an argument of programs, or None where it is static; None if it always is.
    """

    read: Callable[[Any], Any]
    words: str
    argument: Callable[[Any], Any] | None = None

    def check(self, name: str, value: Any) -> Any:
        """The value as it is stored; raises ValueError with the name, the value and what is valid."""
        try:
            return self.read(value)
        except NotRepresentable as error:
            raise ValueError(f"{name}={shown(value)} must be {self.words}, {error}") from None
        except (ValueError, OverflowError):  # the latter of fractions beyond float64
            raise ValueError(f"{name}={shown(value)} must be {self.words}") from None


class NotRepresentable(ValueError):
    """A number in a field's range that programs cannot hold; the message says which ones they can."""


def shown(value: Any) -> str:
    """A value as error messages show it: its `repr`, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        text = f"<{value.bit_length()} bits>" if isinstance(value, int) else object.__repr__(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@functools.lru_cache(maxsize=512)
def rule_of(annotation: Any, example: str) -> Rule | None:
    """The rule that an annotation states; None if it is no kind of option."""
    kind, nullable, marks = _parts(annotation)

    # What None means narrows no kind: it is taken out before the kind asks which marks it reads.
    meaning = [mark.meaning for mark in marks if isinstance(mark, NoneMeans)]
    marks = [mark for mark in marks if not isinstance(mark, NoneMeans)]
    if meaning and not nullable:
        raise TypeError(f"NoneMeans({meaning[-1]!r}) marks an annotation that does not allow None")
    rule = _kind(kind, marks, example)
    if rule is None or not nullable:
        return rule
    words = f"{rule.words}, or None" + (f" for {meaning[-1]}" if meaning else "")
    return rule._replace(read=lambda value: None if value is None else rule.read(value), words=words)


def _parts(annotation: Any) -> tuple[Any, bool, list[Any]]:
    """The kind alone, whether None is allowed too, and the marks, whose groups are taken apart."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind, nullable, marks = _parts(arguments[0])
        for mark in annotation.__metadata__:
            single = list(mark) if isinstance(mark, annotated_types.GroupedMetadata) else [mark]
            marks += [entry for entry in single if isinstance(entry, MARKS)]
        return kind, nullable, marks
    if origin in UNIONS:
        # Next to a number, None and arrays leave its kind as it is.
        rest = tuple(kind for kind in arguments if kind is not types.NoneType)
        kinds = [kind for kind in rest if not isinstance(kind, type) or not issubclass(kind, AbstractArray)]
        if len(kinds) == 1:
            kind, nullable, marks = _parts(kinds[0])
            return kind, nullable or types.NoneType in arguments, marks
        return functools.reduce(operator.or_, rest), len(rest) < len(arguments), []
    return annotation, False, []


def _kind(kind: Any, marks: list[Any], example: str) -> Rule | None:
    """The rule of a kind of value, narrowed by the marks."""
    if kind is bool:
        rule, reads = _choice((True, False), "True or False"), ()
    elif kind in (int, float):
        whole = (Odd, Int32) if kind is int else ()
        rule, reads = _numbers(kind, marks), (Ge, Gt, Le, Lt, Traced, *whole)
    elif typing.get_origin(kind) is Literal:
        words = typing.get_args(kind)
        rule, reads = _choice(words, f"one of {', '.join(map(repr, words))}"), ()
    elif typing.get_origin(kind) in UNIONS:
        rule, reads = _either(typing.get_args(kind), example), ()
    elif typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        rule, reads = _sequence(typing.get_args(kind)[0], marks), (MinLen, PerLayer)
    else:
        rule, reads = _instances(kind, example), ()
    for mark in marks:
        if not isinstance(mark, reads):
            raise TypeError(f"{mark!r} does not apply to {getattr(kind, '__name__', kind)}")
        if isinstance(mark, Traced) and rule is not None:
            rule = _traced(rule, kind, mark)
    return rule


def _traced(rule: Rule, kind: type[float] | type[int], mark: Traced) -> Rule:
    """The rule of a number that may be traced: its range is checked unless it is."""

    def read(value: Any) -> Any:
        # Of a tracer shape and dtype are checked, as its value is not known; other arrays become numbers.
        value = scalar(value, kind) if isinstance(value, jax.Array) else value
        return value if isinstance(value, Tracer) else rule.read(value)

    def as_argument(value: Any) -> Any:
        # At its `unless`, such as a guidance of 0, a number is static: what it switches off is not compiled.
        fixed = mark.unless is not None and fixed_at(value, mark.unless)
        return None if value is None or fixed else argument(value, kind)

    return rule._replace(read=read, argument=as_argument)


def _numbers(kind: type[float] | type[int], marks: list[Any]) -> Rule:
    """Whole numbers, or finite ones, within bounds."""
    whole = kind is int
    odd, int32 = (any(isinstance(mark, kind) for mark in marks) for kind in (Odd, Int32 | Traced))
    # Bounds with whether they are excluded or included: the order of tuples tells the narrowest.
    bounds = lambda kind, name, flag: [(getattr(m, name), flag) for m in marks if isinstance(m, kind)]
    lows = bounds(Ge, "ge", False) + bounds(Gt, "gt", True)
    highs = bounds(Le, "le", True) + bounds(Lt, "lt", False)
    low, excluded = max(lows, default=(-math.inf, True))
    high, included = min(highs, default=(math.inf, False))
    if whole:
        # Above 0 is from 1 on: whole numbers need no open ends, in checks or in messages.
        low, high = low + excluded, high - (not included)

    def read(value: Any) -> Any:
        # bool is a whole number to Python, and a likely mistake here.
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
            raise ValueError
        number: Any = (int if whole or isinstance(value, int) else float)(value)  # pyright: ignore[reportArgumentType]
        if not low <= number <= high or (odd and number % 2 == 0):
            raise ValueError
        if not whole and ((excluded and number == low) or (not included and number == high)):
            raise ValueError
        # In the field's range, but no number of the programs'.
        if int32 and whole and not -INT32 <= number < INT32:
            raise NotRepresentable("and one that int32 holds, below 2**31")
        if not whole and number and not SMALLEST <= abs(number) <= LARGEST:
            raise NotRepresentable("and one that float32 holds, 0 or of a size from 1.2e-38 to 3.4e38")
        return number

    if whole:
        noun = "an odd number" if odd else "a whole number"
        ends = [f" of at least {low}"] * bool(lows) + [f" of at most {high}"] * bool(highs)
        return Rule(read, f"{noun} in {low}..{high}" if len(ends) == 2 else noun + "".join(ends))
    if not lows and not highs:
        return Rule(read, "a finite number")
    begin, end = "(" if excluded else "[", "]" if included else ")"
    return Rule(read, f"a number in {begin}{low}, {high}{end}")


def _choice(words: tuple[Any, ...], said: str) -> Rule:
    """One of the literals; as 1 == True, their types count too."""

    def read(value: Any) -> Any:
        value = bool(value) if isinstance(value, np.bool_) else value
        for word in words:
            if type(value) is type(word) and value == word:
                return word
        raise ValueError

    return Rule(read, said)


def _sequence(item: Any, marks: list[Any]) -> Rule | None:
    """Lists, tuples and one-dimensional arrays of one kind of value; stored as tuples."""
    rule = rule_of(item, "")
    if rule is None:
        return None
    least = max((mark.min_length for mark in marks if isinstance(mark, MinLen)), default=0)

    def read(value: Any) -> tuple[Any, ...]:
        items = value.tolist() if isinstance(value, np.ndarray | jax.Array) else value
        items = tuple(items) if isinstance(items, range) else items

        # A set has no order, and a generator one pass only: neither is taken.
        if not isinstance(items, list | tuple) or len(items) < least:
            raise ValueError
        return tuple(map(rule.read, items))

    count = f"{least} or more values" if least else "values"
    if any(isinstance(mark, PerLayer) for mark in marks):
        count = "values, one per layer"
    return Rule(read, f"{count}, each {rule.words}")


def _either(kinds: tuple[Any, ...], example: str) -> Rule | None:
    """A value of any of several kinds, the first one that takes it; no rule if one of them has none."""
    rules = [rule for kind in kinds if (rule := rule_of(kind, example))]
    if len(rules) < len(kinds):
        return None

    def read(value: Any) -> Any:
        for rule in rules:
            with contextlib.suppress(ValueError, OverflowError):
                return rule.read(value)
        raise ValueError

    return Rule(read, " or ".join(rule.words for rule in rules))


def _instances(kind: Any, example: str) -> Rule | None:
    """Instances of a class; no rule if the annotation is no class or one that `isinstance` refuses."""
    if not isinstance(kind, type):
        return None
    try:
        isinstance(None, kind)
    except TypeError:  # Any, a protocol that is not runtime_checkable
        return None

    def read(value: Any) -> Any:
        # A class has the members of a protocol that its instances have.
        if not isinstance(value, kind) or (isinstance(value, type) and kind is not type):
            raise ValueError
        return value

    article = "an" if kind.__name__[0].lower() in "aeiou" else "a"
    return Rule(read, f"{article} {kind.__name__}{example}")


# -- paths: the one place where `~`, `..`, links and relative paths become absolute ones ---------------

URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?P<rest>.*)")  # a drive such as C: is none
HUB = ("huggingface.co/", "hf.co/")


def local_path(name: str, value: Any) -> Path:
    """The absolute path of a file or directory on this machine, without `~`, `..` and links.

    Args:
      name: Name of the argument, for messages.
      value: Path as the user gave it.

    Raises:
      ValueError: no path, an empty one, a URL, or links in a circle.
      PermissionError: it lies in a directory that may not be searched.
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ValueError(f"{name}={shown(value)} must be a path, as a str or a pathlib.Path")
    if url := URL.fullmatch(str(value)):
        raise ValueError(
            f"{name}={shown(str(value))} is a URL, not a path on this machine. {_instead(**url.groupdict())}"
        )
    try:
        os.stat(value)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        # A text that is no path, such as a whole file's content: too long, or with a zero byte in it.
        if not isinstance(error, OSError) or error.errno == errno.ENAMETOOLONG:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{name}={shown(str(value))} is no path: {reason}") from None
    return absolute(Path(value))


def absolute(path: Path) -> Path:
    """The path without `~`, `..` and links; raises ValueError if links lead in a circle."""
    with contextlib.suppress(RuntimeError):  # no such user: then it is a name like others
        path = path.expanduser()
    # Links in a circle raise RuntimeError up to Python 3.12; later they stay in the path.
    with contextlib.suppress(RuntimeError):
        resolved = path.resolve()
        if not any(part.is_symlink() for part in (resolved, *resolved.parents)):
            return resolved
    raise ValueError(f"{path} is a link in a circle")


def _instead(scheme: str, rest: str) -> str:
    """The way to a checkpoint at a URL, as a message ends."""
    if scheme == "file":
        return f"Pass the path alone: {'/' + unquote(rest)!r}."
    for hub in HUB:
        if rest.startswith(hub):
            return f"Pass the hub id: {'/'.join(rest.removeprefix(hub).split('/')[:2])!r}."
    if scheme == "hf":
        return f"Pass the hub id: {'/'.join(rest.split('/')[:2])!r}."
    return f"Copy it to this machine first{' (gcloud storage cp -r)' if scheme == 'gs' else ''}."
