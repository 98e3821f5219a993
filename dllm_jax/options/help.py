"""Options and functions as `help` shows them: inherited options with their own, signatures that are short."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
SECTION = re.compile(r"^Attributes:\n((?:  .*\n?|\n(?=  ))*)", re.MULTILINE)
ENTRY = re.compile(r"^  (\w+): .*\n?(?:^   +.*\n?)*", re.MULTILINE)


def entries(doc: str | None) -> dict[str, str]:
    """The entries of a docstring's section "Attributes", by the names that they describe."""
    found = SECTION.search(inspect.cleandoc(doc or "") + "\n")
    return {entry[1]: entry[0].rstrip() for entry in ENTRY.finditer(found[1])} if found else {}


def describe_inherited(cls: type):
    """Adds the entries of fields that a class inherits to its docstring, each from the nearest ancestor."""
    if not (doc := vars(cls).get("__doc__")):
        return
    known = entries(doc)
    fields = {name for base in cls.__mro__[1:] for name in vars(base).get("__dataclass_fields__", ())}
    inherited = dict[str, str]()
    for base in cls.__mro__[1:]:
        for name, entry in entries(vars(base).get("__doc__")).items():
            if name in fields and name not in known:
                inherited.setdefault(name, entry)
    if not inherited:
        return
    doc, more = inspect.cleandoc(doc), "\n".join(inherited.values())
    section = SECTION.search(doc + "\n")
    if section is None:
        cls.__doc__ = f"{doc}\n\nAttributes:\n{more}"
        return
    before, after = doc[: section.end()].rstrip(), doc[section.end() :].lstrip("\n")
    cls.__doc__ = f"{before}\n{more}" + (f"\n\n{after}" if after else "")


def call(value: Any, always: tuple[str, ...] = ()) -> str:
    """The constructor call that makes options, without the fields that are at their defaults.

    Args:
      value: a dataclass, or a literal.
      always: names of fields to write even at their defaults.
    """
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    arguments = [
        f"{field.name}={call(now)}" for field, now in fields if now != field.default or field.name in always
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"


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
