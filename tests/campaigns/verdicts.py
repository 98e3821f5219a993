"""What a case of a campaign is, and how the outcome of a call is judged."""

import dataclasses
import enum
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dllm_jax
import pallas_kernels

OURS = tuple(str(Path(package.__file__).parent) for package in (dllm_jax, pallas_kernels))


class Outcome(enum.StrEnum):
    """How a case ended; the values head the columns of the table."""

    RIGHT = "right"
    CLEAR = "clear error"
    UNCLEAR = "unclear"
    CRASH = "crash"
    WRONG = "wrong"

    @property
    def bad(self) -> bool:
        """Whether the library has to be mended."""
        return self not in (Outcome.RIGHT, Outcome.CLEAR)


class Verdict(NamedTuple):
    """How a case ended, and for what is not right in which way."""

    outcome: Outcome
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to try, described in a line with every value that reproduces it.

    An exception that `run` lets through is a crash, and so is not to end within `limit` seconds.
    """

    description: str
    run: Callable[[], Verdict]
    limit: float = 120.0


def judge(
    call: Callable[[], Any],
    named: Sequence[str],
    valid: bool | None = None,
    check: Callable[[Any], str] = lambda result: "",
) -> Verdict:
    """Calls and judges what comes of it.

    A clear error names one of the arguments or files in `named`. `valid` says whether the call has to succeed
    or to be refused, None that both will do; `check` what is wrong with a result, in words, "" if nothing is.
    """
    try:
        result = call()
    except Exception as error:
        if valid:
            return Verdict(Outcome.WRONG, f"valid, but {_described(error)}")
        fault = _unclear(error, named)
        return Verdict(Outcome.UNCLEAR, fault) if fault else Verdict(Outcome.CLEAR)
    fault = "accepted, but invalid" if valid is False else check(result)
    return Verdict(Outcome.WRONG, fault) if fault else Verdict(Outcome.RIGHT)


def _unclear(error: Exception, named: Sequence[str]) -> str:
    """Why an error is no ValueError, TypeError or OSError of ours that says what is wrong; "" if it is."""
    if not isinstance(error, ValueError | TypeError | OSError) or isinstance(error, UnicodeError):
        return _described(error)
    known = isinstance(error, OSError) and error.filename is not None  # it names its file itself
    if not known and not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(OURS):
        return f"raised elsewhere: {_described(error)}"
    if not any(name in str(error) for name in named):
        return f"names none of {', '.join(named)}: {_described(error)}"
    return ""


def _described(error: Exception) -> str:
    last, text = traceback.extract_tb(error.__traceback__)[-1], " ".join(str(error).split())
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {text[:300]}"
