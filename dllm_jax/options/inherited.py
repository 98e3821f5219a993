"""Descriptions of inherited options, which `help` of a class shows with its own."""

import inspect
import re

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
