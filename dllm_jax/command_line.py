"""Command lines: how they read paths, and how they report bad input."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

INTERRUPTED = 130  # exit status of a program that SIGINT ended, as shells have it
PATHS = ConstructorRegistry()  # `registry` of every tyro.cli: a shell leaves the `~` of --out=~/runs as it is


@PATHS.primitive_rule
def _path(described: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """Reads a path whose `~` is the user's home."""
    if described.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: Path(words[0]).expanduser(),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the program with one line in place of a traceback: exit code 2 on bad input, 130 on Ctrl-C."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from error
