"""Keeps one entry per option in the parameter lists of functions that take `**options: Unpack[...]`."""

from typing import Any

from griffe import DocstringSectionKind, Extension, Function


class OneEntry(Extension):
    """Gives the described entry of an option the type that griffe's `unpack_typeddict` has added."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Merges entries of equal name."""
        parsed = vars(func.docstring).get("parsed", ()) if func.docstring else ()
        for section in parsed:
            if section.kind is DocstringSectionKind.parameters:
                found: dict[str, Any] = {}
                for entry in section.value:
                    first = found.setdefault(entry.name, entry)
                    if first is not entry:
                        first.annotation = first.annotation or entry.annotation
                section.value[:] = [e for e in found.values() if e.description]
