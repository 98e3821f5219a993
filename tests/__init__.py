"""The tests, what checks annotations while they run, and what tests read of files."""

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, Never

DATA = pathlib.Path(__file__).parent / "data"
DOCS = pathlib.Path(__file__).parents[1] / "docs"


def table(name: str) -> Any:
    """What `tests/data/NAME.json` holds."""
    return json.loads((DATA / f"{name}.json").read_text())


def examples(page: str) -> list[str]:
    """The Python blocks of a page under docs/, by its path."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run_page(page: str, words: dict[str, str] | None = None, names: dict | None = None) -> dict:
    """Runs the blocks of a page, see `run_blocks`."""
    return run_blocks(examples(page), words, names)


def run_blocks(blocks: list[str], words: dict[str, str] | None = None, names: dict | None = None) -> dict:
    """Runs blocks from top to bottom as a reader does; returns the names that there are then.

    `words` of the text that others replace must be there; `names` are what the page takes for granted.
    """
    text, names = "\x00".join(blocks), {} if names is None else names
    for old, new in (words or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    for block in text.split("\x00"):
        exec(block, names)
    return names


def refuses(message: str, call: Callable, /, *arguments, error: type[Exception] = ValueError, **options):
    """Asserts that a call raises an error whose text matches `message`."""
    import pytest  # here, so that `python -m tests.replay` does without

    with pytest.raises(error, match=message):
        call(*arguments, **options)


def checked(annotated):
    """A function or class, checked by beartype; an int is a float, as PEP 484 has it.

    Functions made within functions are left alone: they would be made ready for checks at every call.
    """
    if "<locals>" in annotated.__qualname__:
        return annotated
    from beartype import BeartypeConf, beartype  # here, so that `python -m tests.replay` does without

    # `**unknown: Never` has pyright refuse other names; beartype refuses the annotation.
    hints = getattr(annotated, "__annotations__", {})
    if any(hint is Never for hint in hints.values()):
        annotated.__annotations__ = {name: hint for name, hint in hints.items() if hint is not Never}
    return beartype(annotated, conf=BeartypeConf(is_pep484_tower=True))
