"""Tables of docs/performance.md from results: `python -m bench.tables bench/results/generate_cpu.json`."""

import json
from pathlib import Path
from typing import Annotated, Any

import tyro


def ratios(report: dict[str, Any]) -> list[str]:
    """Markdown lines of `bench.generate`'s results: what was computed, and ratios over the exact decoder."""
    lines = ["| policy | positions per token | forwards | over exact | range |", "|---|---:|---:|---:|---|"]
    for row in report["rows"]:
        name = f"| `{row['policy'].split('(')[0]}` |"
        if row.get("over_exact") is None or "forwards" not in row:
            lines.append(f"{name} {row.get('error', 'not timed')} | | | |")
            continue
        ratio, pairs = row["over_exact"], len(row["over_exact"]["values"])
        spread = f"{ratio['low']:.2f} to {ratio['high']:.2f} of {pairs}"
        if row["exact_seconds"] == row["seconds"]:
            spread = ""  # the exact decoder itself
        cells = (
            f"{row['positions_per_token']:.1f} | {row['forwards']:.0f} | {ratio['median']:.2f}x | {spread} |"
        )
        lines.append(f"{name} {cells}")
    return lines


def main(file: Annotated[Path, tyro.conf.Positional]):
    """Prints the table."""
    print("\n".join(ratios(json.loads(file.read_text()))))


if __name__ == "__main__":
    tyro.cli(main)
