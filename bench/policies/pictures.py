"""The table of docs/vision.md: accuracy on questions about pictures, from what bench.policies measured.

    python -m bench.policies.pictures bench/results/policies_pictures_cpu.json

Costs and agreement with the exact decoder are in the results.
"""

from typing import Any

import tyro

from bench.policies.grid import PICTURED_LONG, PICTURED_SHORT, Setting, find
from bench.policies.workloads import ASKED_OF_PICTURES, BLOCK
from bench.shared import runner
from dllm_jax.eval.run.files import read_json
from dllm_jax.published.expressions import call

HEADS = ("policy", *ASKED_OF_PICTURES, "K/V pairs")


def table(measured: dict[str, Any], model: str) -> str:
    """Markdown: exact match on each task in percent with its 95 % interval, and K/V pairs that are kept.

    Settings whose options follow from the length of the answer share a line; it says those of short answers.
    """
    workloads = {task: measured[f"{model} {task}"] for task in ASKED_OF_PICTURES}
    lines = []
    for short, long in zip(PICTURED_SHORT, PICTURED_LONG, strict=True):
        asked = ASKED_OF_PICTURES.items()
        of = {task: short if question.length == BLOCK else long for task, question in asked}
        rows = [find(workloads[task], setting) for task, setting in of.items()]
        if all(rows):
            pairs = " / ".join(dict.fromkeys(f"{row['kept_pairs']:.0f}" for row in rows if row))
            lines.append((_name(short), *(_percent(row) for row in rows if row), pairs))
    return runner.table(HEADS, "l" + "r" * (len(HEADS) - 1), lines)


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
