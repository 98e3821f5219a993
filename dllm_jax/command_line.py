"""How command lines report bad input."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the program on bad input with exit code 2 and the message alone, without a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
