"""The table of docs/vision.md: accuracy on questions about pictures, from what bench.policies measured.

    python -m bench.policies.pictures bench/results/policies_pictures_cpu.json

Agreement with the exact decoder is in the results.
"""

from typing import Any

import tyro

from bench.policies.grid import PICTURED, Setting, find
from bench.policies.workloads import ASKED_OF_PICTURES
from bench.shared import runner
from dllm_jax.eval.run.files import read_json
from dllm_jax.published.expressions import call

COSTS = ("computed", "K/V pairs")


def table(measured: dict[str, Any], model: str) -> str:
    """Markdown: exact match on each task in percent with its 95 % interval, and costs on the last one.

    Tasks that were not measured have no column, settings that were not no line.
    """
    tasks = [task for task in ASKED_OF_PICTURES if f"{model} {task}" in measured]
    workloads = [measured[f"{model} {task}"] for task in tasks]
    lines = []
    for setting in PICTURED:
        rows = [row for workload in workloads if (row := find(workload, setting)) is not None]
        if len(rows) == len(workloads):
            costs = f"{rows[-1]['computed']:.0%}", f"{rows[-1]['kept_pairs']:.0f}"
            lines.append((_name(setting), *map(_percent, rows), *costs))
    heads = ("policy", *tasks, *COSTS)
    return runner.table(heads, "l" + "r" * (len(heads) - 1), lines)


def _name(setting: Setting) -> str:
    note = setting.variant and f", {setting.variant}"
    return f"`{call(setting.policy)}`{note}"


def _percent(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['accuracy']:.1%} ({100 * low:.0f}-{100 * high:.0f})"


def main(results: runner.Results, model: str = "tiny-llada-v"):
    """Prints the table."""
    print(table(read_json(results)["models"], model))


if __name__ == "__main__":
    tyro.cli(main)
