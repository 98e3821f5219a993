"""What fits where: memory per chip of whole generations, by the compilers' account; no chip is needed.

    python -m bench.compiled.fits h100 "4 x h100" --json FILE
    ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu python -m bench.compiled.fits v6e "4 x v5e" "8 x v5e"

LLaDA-8B in bfloat16 with DualCache, its weights split over all chips of a slice. A row per number of chips,
prompt and batch; what a compiler refuses for want of memory does not fit.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated

import tyro

from bench.compiled.process import provenance, row
from bench.compiled.program import Case
from bench.compiled.targets import TARGETS
from bench.shared import runner

REQUESTS = ((1024, 1), (1024, 8), (8192, 1), (32768, 1))  # prompt, batch
REFUSED = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that share a model: "v6e", or "4 x v5e"."""

    target: str
    chips: int

    @classmethod
    def read(cls, name: str) -> "Slice":
        """Reads a name.

        Raises:
          ValueError: it has another form, or the target is not known.
        """
        found = re.fullmatch(r"(?:(\d+) x )?(\w+)", name)
        if not found or found[2] not in TARGETS:
            raise ValueError(f"{name!r} is none of {', '.join(TARGETS)}, or such a name after '4 x '")
        return cls(found[2], int(found[1] or 1))

    def cases(self) -> Iterator[Case]:
        """All requests."""
        for prompt, batch in REQUESTS:
            yield Case(self.target, "DualCache", prompt=prompt, batch=batch, tp=self.chips)


def _peak(row: runner.Row) -> str:
    if "error" in row:
        return "no" if REFUSED in row["error"] else row["error"]
    return f"{row['peak'] / 1e9:.1f}" + ("" if row["fits"] else " (no)")


COLUMNS: runner.Columns = {
    "chips": lambda row: f"{row['tp']} x {row['target']}",
    "each has, GB": lambda row: f"{TARGETS[row['target']].hardware.capacity / 1e9:.0f}",
    "prompt": lambda row: row["prompt"],
    "batch": lambda row: row["batch"],
    "peak per chip, GB": _peak,
}


def main(
    slices: Annotated[tuple[str, ...], tyro.conf.Positional],
    json: runner.JsonFile = None,
):
    """Compiles and prints.

    Args:
      slices: such as "v6e" or "4 x h100".
      json: results go here; rows of other slices in the file stay.
    """
    wanted = [Slice.read(name) for name in slices]
    names = {(chosen.target, chosen.chips) for chosen in wanted}
    earlier = runner.read(json, {"rows": []})["rows"]
    kept = [row for row in earlier if (row["target"], row["tp"]) not in names]
    rows = (row(case, None) for chosen in wanted for case in chosen.cases())
    runner.run(rows, COLUMNS, json, lambda rows: provenance("bfloat16") | {"rows": kept + rows})


if __name__ == "__main__":
    tyro.cli(main)
