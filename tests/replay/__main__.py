"""Command line: replays every case under a folder and prints a row per case."""

import collections
import pathlib
import sys
import time
from typing import Annotated, Any

import rich.console
import tyro

from bench.shared import runner
from dllm_jax.provenance import measured_on
from tests.programs import forget_in_time
from tests.replay.case import Case, UnknownSetting, find
from tests.replay.compare import Differs, Skipped
from tests.replay.methods import METHODS, replay


def replayed(case: Case) -> dict[str, Any]:
    """What came of a case: ok, differs, refused or skipped, and why; in seconds, compilation included.

    An error other than a difference is a bug and propagates.
    """
    start, outcome, detail = time.perf_counter(), "ok", ""
    try:
        if case.method not in METHODS:
            raise Skipped("method is not in this library yet")
        if case.status == "info":
            raise Skipped(case.settings["status_reason"])
        replay(case)
    except (Differs, Skipped, UnknownSetting) as found:
        outcome, detail = found.outcome, str(found)
    except ValueError as refusal:
        if case.status == "conform":
            raise
        outcome, detail = Skipped.outcome, f"refused: {refusal}"
    forget_in_time()
    row = {"case": case.name, "status": case.status, "dtype": case.settings.get("dtype", "-")}
    return row | {"outcome": outcome, "detail": detail, "seconds": time.perf_counter() - start}


def main(
    folder: tyro.conf.Positional[pathlib.Path],
    method: Annotated[str | None, tyro.conf.arg(help="replay only this method")] = None,
    json_file: Annotated[pathlib.Path | None, tyro.conf.arg(name="json", help="write the rows here")] = None,
) -> int:
    """Replays recorded traces; exit code 1 if a `conform` case of a supported method differs."""
    cases = find(folder, method)
    if not cases:
        print(f"no cases under {folder}" + (f" for method {method}" if method else ""), file=sys.stderr)
        return 2
    console, rows = rich.console.Console(soft_wrap=True, highlight=False, markup=False), []
    for case in cases:
        rows.append(row := replayed(case))
        console.print(f"{row['outcome']:8} {row['status']:9} {row['case']}  {row['detail']}")
    conform = [r for r in rows if r["status"] == "conform" and r["case"].split("/")[0] in METHODS]
    passed = sum(r["outcome"] == "ok" for r in conform)
    console.print(f"{passed} of {len(conform)} conform")
    counts = collections.Counter(r["outcome"] for r in rows)
    console.print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    if json_file:
        counted = {"conform": passed, "of": len(conform)}
        runner.write(json_file, measured_on("as recorded") | counted | {"cases": rows})
    return 0 if passed == len(conform) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
