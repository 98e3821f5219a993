"""Signatures that are short where `help` prints them."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from dllm_jax.options.base import call

Function = TypeVar("Function", bound=Callable[..., Any])


class ShortSignature(inspect.Signature):
    """A signature that prints its names and defaults in lines of 79 characters, as `help` shows it.

    It has all annotations, but does not print them: those of arrays are longer than the docstring.
    """

    def __str__(self) -> str:
        """Returns the parameters in brackets, and what is returned."""
        names, starred = [], False
        for parameter in self.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                names, starred = [*names, "*"], True
            has_default = parameter.default is not parameter.empty
            names.append(f"{parameter.name}={call(parameter.default)}" if has_default else parameter.name)
        lines = textwrap.wrap(", ".join(names), 75, break_long_words=False, break_on_hyphens=False)
        returned = self.return_annotation
        name = "" if returned is self.empty else f" -> {getattr(returned, '__name__', returned)}"
        return "(\n    " + "\n    ".join(lines) + f"\n){name}"

    def format(self, **_: Any) -> str:
        """Returns the same text, for `help` of Python 3.13 and later."""
        return str(self)


def short_help(function: Function) -> Function:
    """Lets `help` begin with a short signature; `inspect.signature` and editors see all annotations."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())
    setattr(function, "__signature__", ShortSignature(parameters, return_annotation=found.return_annotation))  # noqa: B010
    return function
