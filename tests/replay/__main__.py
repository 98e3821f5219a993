"""Command line: replays every case under a folder and prints a row per case."""

import collections
import dataclasses
import datetime
import json
import pathlib
import sys
import time
from typing import Annotated

import jax
import rich.console
import rich.table
import tyro

from tests.programs import forget_in_time
from tests.replay.case import Case, UnknownSetting, find
from tests.replay.compare import Differs, Skipped
from tests.replay.methods import METHODS, replay


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one case: ok, differs, refused or skipped, and why; in seconds, compilation included."""

    case: str
    status: str
    dtype: str
    outcome: str
    detail: str
    seconds: float


def outcome_of(case: Case) -> Result:
    """Replays one case; an error other than a difference is a bug and propagates."""
    start = time.perf_counter()
    outcome, detail = "ok", ""
    try:
        if case.method not in METHODS:
            raise Skipped("method is not in this library yet")
        if case.status == "info":
            raise Skipped(case.settings["status_reason"])
        replay(case)
    except Differs as difference:
        outcome, detail = "differs", str(difference)
    except Skipped as reason:
        outcome, detail = "skipped", str(reason)
    except UnknownSetting as unknown:
        outcome, detail = "refused", str(unknown)
    except ValueError as refusal:
        if case.status == "conform":
            raise
        outcome, detail = "skipped", f"refused: {refusal}"
    dtype = case.settings.get("dtype", "-")
    return Result(case.name, case.status, dtype, outcome, detail, time.perf_counter() - start)


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
    console = rich.console.Console(soft_wrap=True)
    results = []
    for case in cases:
        results.append(outcome_of(case))
        forget_in_time()
        row = results[-1]
        console.print(
            f"{row.outcome:8} {row.status:9} {row.case}  {row.detail}", highlight=False, markup=False
        )
    conform = [r for r in results if r.status == "conform" and r.case.split("/")[0] in METHODS]
    passed = sum(r.outcome == "ok" for r in conform)
    counts = collections.Counter(r.outcome for r in results)
    console.print(f"{passed} of {len(conform)} conform", highlight=False)
    console.print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())), highlight=False)
    if json_file:
        where = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        header = {**where, "date": datetime.date.today().isoformat()}
        rows = [dataclasses.asdict(r) for r in results]
        json_file.write_text(
            json.dumps({**header, "conform": passed, "of": len(conform), "cases": rows}, indent=1)
        )
    return 0 if passed == len(conform) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
