"""The tables of background/compiled.md and how-to/scaling.md say what the recorded programs' files say."""

import json
import pathlib
import re
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
IMPLEMENTATIONS = {None: "", "cudnn": ", cuDNN", "pallas": ", kernels"}
# Programs that are compiled in another way than by default, or hold images; their figures are in sentences.
ELSEWHERE = {"compiled_fits", "compiled_int8", "compiled_v6e_O1", "compiled_v6e_width640"}


def program(row: dict[str, Any], jax: str) -> str:
    """What the first column calls the program of a row."""
    chips, name = row["tp"] * row["dp"], row["target"]
    if chips > 1:
        name = f"{chips} x {name.upper()}" if name.startswith("h") else f"{name} x {chips}"
    if row["dp"] > 1:
        name += f" (dp {row['dp']}, tp {row['tp']})"
    name += f", {row['layers']} layers" + (f", jax {jax[:4]}" if jax >= "0.12" else "")
    name += (", Dream-7B" if row["shape"] == "dream-7b" else "") + IMPLEMENTATIONS[row["implementation"]]
    if row["batch"] > 1:  # named before the implementation
        kernels = IMPLEMENTATIONS[row["implementation"]]
        name = f"{name.removesuffix(kernels)}, batch {row['batch']}{kernels}"
    return name


def cells(row: dict[str, Any]) -> list[str]:
    """The figures that both tables have: peak GB, the reuse step's two ratios, the full step's."""
    reuse = row.get("reuse_step")
    partial = [reuse[key] for key in ("ratio", "ratio_beyond_cache")] if reuse else [None, None]
    shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in (*partial, row["full_step"]["ratio"])]
    return [f"{row['peak'] / 1e9:.1f}", *shown]


def recorded() -> dict[tuple[str, str], list[list[str]]]:
    """Cells by program and policy; a program that was compiled for several files has several."""
    found = {}
    for file in sorted((ROOT / "bench" / "results").glob("compiled_*.json")):
        document = json.loads(file.read_text())
        for row in document["rows"] if file.stem not in ELSEWHERE else []:
            if not row["images"]:
                found.setdefault((program(row, document["jax"]), row["policy"]), []).append(cells(row))
    return found


@pytest.mark.parametrize(
    ("page", "begin", "least"), [("background/compiled", 3, 60), ("how-to/scaling", 2, 50)]
)
def test_tables_of_compiled_programs_are_the_files(page, begin, least):
    rows = re.findall(
        r"^\| ([^|]+ layers[^|]*) \| `(\w+)` \|(.*)\|$", (ROOT / "docs" / f"{page}.md").read_text(), re.M
    )
    assert len(rows) >= least
    files = recorded()
    for name, policy, rest in rows:
        printed = [cell.strip() for cell in rest.split("|")]
        assert printed[begin - 2 : begin + 2] in files[name, policy], (name, policy)


@pytest.mark.parametrize("step", ["reuse_step", "full_step"])
def test_estimated_cycles_after_the_change_are_the_file_s(step):
    text = (ROOT / "docs" / "background" / "compiled.md").read_text()
    table = text[text.index("| policy | reuse step before |") :].split("\n\n")[0]
    printed = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.M))
    rows = json.loads((ROOT / "bench" / "results" / "compiled_v6e.json").read_text())["rows"]
    assert set(printed) == {row["policy"] for row in rows}
    for row in rows:
        cycles = f"{row[step]['estimated_cycles'] / 1e6:.1f}" if step in row else "-"
        assert printed[row["policy"]].split(" | ")[1 if step == "reuse_step" else 3] == cycles
