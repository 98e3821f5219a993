"""Tables of docs/performance.md: `python -m bench.generate.tables bench/results/generate_cpu.json`."""

from typing import Any

import tyro

from bench.shared import runner
from dllm_jax.eval.run.files import read_json

HEADS = ("policy", "positions per token", "forwards", "over exact", "range")


def ratios(report: dict[str, Any]) -> str:
    """Markdown of `bench.generate`'s results: what was computed, and ratios over the exact decoder."""
    lines = []
    for row in report["rows"]:
        name = f"`{row['policy'].split('(')[0]}`"
        if row.get("over_exact") is None or "forwards" not in row:
            lines.append((name, row.get("error", "not timed"), "", "", ""))
            continue
        ratio, pairs = row["over_exact"], len(row["over_exact"]["values"])
        spread = f"{ratio['low']:.2f} to {ratio['high']:.2f} of {pairs}"
        if row["exact_seconds"] == row["seconds"]:
            spread = ""  # the exact decoder itself
        counts = f"{row['positions_per_token']:.1f}", f"{row['forwards']:.0f}"
        lines.append((name, *counts, f"{ratio['median']:.2f}x", spread))
    return runner.table(HEADS, "lrrrl", lines)


def main(results: runner.Results):
    """Prints the table."""
    print(ratios(read_json(results)))


if __name__ == "__main__":
    tyro.cli(main)
