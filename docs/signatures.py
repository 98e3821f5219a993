"""Shows the options of functions that take `**options: Unpack[...]` in their signatures, with their defaults.

griffe's own `unpack_typeddict` parses a docstring before it knows the options, and reports each described one
as unknown. It shows no defaults either, as a `TypedDict` has none.
"""

import inspect
import operator
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[1]))

from dllm_jax.expressions import call


class UnpackedOptions(griffe.Extension):
    """Replaces `**options: Unpack[Group]` by one keyword parameter for each option of the group."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Expands the signature of one function; its docstring describes the options."""
        packed = [p for p in func.parameters if unpacks(p.annotation)]
        for parameter in packed:
            group = func.modules_collection[parameter.annotation.slice.canonical_path]
            options = {**group.inherited_members, **group.members}
            module = __import__(func.module.path, fromlist=["*"])
            run_time = operator.attrgetter(func.path.removeprefix(f"{func.module.path}."))(module)
            defaults = {n: call(p.default) for n, p in inspect.signature(run_time).parameters.items()}
            for name in sorted(options, key=[*defaults, *options].index):
                func.parameters.add(
                    griffe.Parameter(
                        name,
                        annotation=options[name].annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=defaults.get(name, "..."),
                    )
                )
            # A docstring may describe single options or `**options`: it is read while the signature has both.
            _ = func.docstring and func.docstring.parsed
            del func.parameters[parameter.name]


def unpacks(annotation: Any) -> bool:
    """Whether an annotation is `Unpack[...]`."""
    return isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_path.endswith(".Unpack")
