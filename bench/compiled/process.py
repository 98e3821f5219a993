"""A row of results, compiled in a process of its own: a compiler that fails may end it."""

import concurrent.futures
import dataclasses
import multiprocessing
import subprocess
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from bench.compiled.program import Case, compile_case
from bench.shared import runner


def row(case: Case, hlo: Path | None) -> runner.Row:
    """Compiles in a new process; what goes wrong there is in "error"."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            report = pool.submit(compile_case, case).result()
        except BrokenProcessPool:
            return dataclasses.asdict(case) | {"error": "the compiler ended the process"}
        except Exception as error:  # the compilers' messages are the result
            return dataclasses.asdict(case) | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if hlo is not None:
        hlo.mkdir(parents=True, exist_ok=True)
        (hlo / f"{case.policy}-{case.target}.hlo").write_text(report.hlo)
    return report.row


def provenance(dtype: str) -> runner.Row:
    """With what results were made: versions, date, and the commit that is compiled (None outside a clone)."""
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    commit = found.stdout.strip() or None
    return runner.provenance(dtype) | {"device": "none: described targets", "commit": commit}
