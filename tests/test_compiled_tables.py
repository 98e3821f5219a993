"""The tables of background/compiled.md and how-to/scaling.md are of the programs that were recorded."""

import pathlib
import re

import pytest

from bench.compiled import recorded

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(("page", "least"), [("background/compiled", 18), ("how-to/scaling", 13)])
def test_rows_about_compiled_programs_are_printed_from_the_files(page, least, capsys):
    recorded.main(tuple((ROOT / "bench" / "results").glob("compiled_*.json")))
    head, _, *lines = capsys.readouterr().out.splitlines()
    text = (ROOT / "docs" / f"{page}.md").read_text()
    rows = re.findall(r"^\| [^|]+ layers[^|]* \| `\w+` \|.*$", text, re.M)
    assert head in text
    assert len(rows) >= least
    assert set(rows) <= set(lines)
