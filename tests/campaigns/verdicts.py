"""What a case of a campaign is, and how the outcome of a call is judged."""

import dataclasses
import enum
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
        return self in (Outcome.UNCLEAR, Outcome.CRASH, Outcome.WRONG)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a case ended, and for what is not right in which way."""

    outcome: Outcome
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to try.

    Attributes:
      description: one line that says what is tried, with every value that reproduces it.
      run: tries it; an exception that it lets through is a crash.
      limit: seconds after which it counts as hanging, which is a crash.
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

    An error is clear if it is a ValueError, a TypeError or an OSError, raised by this library (or an OSError
    that knows its file), and names what is wrong: one of `named`, an argument or a file.

    Args:
      call: what is tried.
      named: words of which a clear error holds at least one.
      valid: whether the call has to succeed (True) or to be refused (False); None if both will do.
      check: what is wrong with a result, in words; "" if nothing is.
    """
    try:
        result = call()
    except Exception as error:
        if valid:
            return Verdict(Outcome.WRONG, f"valid, but {_described(error)}")
        fault = _unclear(error, named)
        return Verdict(Outcome.UNCLEAR, fault) if fault else Verdict(Outcome.CLEAR)
    if valid is False:
        return Verdict(Outcome.WRONG, "accepted, but invalid")
    fault = check(result)
    return Verdict(Outcome.WRONG, fault) if fault else Verdict(Outcome.RIGHT)


def _unclear(error: Exception, named: Sequence[str]) -> str:
    """What makes an error unclear, in words; "" if it is clear."""
    if not isinstance(error, ValueError | TypeError | OSError) or isinstance(error, UnicodeError):
        return _described(error)
    frames = traceback.extract_tb(error.__traceback__)
    known = isinstance(error, OSError) and error.filename is not None
    if not known and not frames[-1].filename.startswith(OURS):
        return f"raised elsewhere: {_described(error)}"
    if not any(name in str(error) for name in named):
        return f"names none of {', '.join(named)}: {_described(error)}"
    return ""


def _described(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {text[:300]}"
