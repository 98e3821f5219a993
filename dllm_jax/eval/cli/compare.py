"""`python -m dllm_jax.eval compare`."""

from pathlib import Path

import rich.console
import tyro

from dllm_jax.eval.results import record
from dllm_jax.eval.results.comparison import compare, tables


def run_compare(
    a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], confidence: float = 0.95, seed: int = 0
) -> int:
    """Differences of two results with bootstrap confidence intervals, paired by request.

    Args:
      a: a result, JSON.
      b: another result of the same evaluation.
      confidence: of the intervals.
      seed: of the resampling.
    """
    console = rich.console.Console()
    found = compare(record.read(a), record.read(b), confidence, seed=seed)
    for table in tables(found, (str(a), str(b)), confidence):
        console.print(table)
    console.print(
        f"{found.same:.1%} of the answers are the same; {found.unpaired} requests without a partner"
    )
    return 0
