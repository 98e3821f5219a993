"""Every setting of every task that bench.policies measured, and the papers' claims with them.

    python -m bench.policies.every bench/results/policies_cpu.json

Columns: exact match (right answers, with their 95% interval, Wilson's), tokens (right tokens of the answers,
end of turn included), as exact (tokens equal to those of exact decoding with the same sampler, block and
steps), computed (computed tokens relative to the first row), kept (KV pairs cached per layer and head, per
prompt), cache KiB (size of the cache, per prompt).
"""

from typing import Any

import tyro

from bench.policies import orderings
from bench.shared import runner
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json


def title(workload: dict[str, Any]) -> str:
    """Shapes in words."""
    count, prompt = workload["prompt"]
    model = f"{workload['layers']} layers of width {workload['width']}, {count} prompts of {prompt} tokens"
    return f"{model}, length {workload['length']}, block {workload['block']}"


def exact_match(row: dict[str, Any]) -> str:
    """The share of right answers and its confidence interval."""
    low, high = row["interval"]
    return f"{row['accuracy']:.1%} ({100 * low:.0f} to {100 * high:.0f})"


COLUMNS: runner.Columns = {
    "policy": lambda row: f"`{row['policy']}`",
    "sampler": lambda row: f"`{row['sampler'].split('(')[0]}`",
    "block": lambda row: row["block"],
    "steps": lambda row: row["steps"],
    "exact match": exact_match,
    "tokens": lambda row: f"{row['token_accuracy']:.1%}",
    "as exact": lambda row: f"{row['agreement']:.1%}",
    "forwards": lambda row: f"{row['forwards']:.1f}",
    "computed": lambda row: f"{row['computed']:.1%}",
    "kept": lambda row: f"{row['kept_pairs']:.0f}",
    "cache KiB": lambda row: f"{row['cache_bytes'] / 1024:.0f}",
}


def table(workload: dict[str, Any]) -> str:
    """All rows of a workload."""
    return runner.table_of(COLUMNS, workload["rows"], left=2)


def tables(measured: dict[str, Any]) -> str:
    """Markdown: a section per workload, and one of all claims on them."""
    shown = [f"## {name}\n\n{title(result)}.\n\n{table(result)}" for name, result in measured.items()]
    return "\n\n".join([*shown, f"## Every comparison\n\n{orderings.table(measured)}"])


def main(results: runner.Results, only: str | None = None):
    """Prints a table per workload, or that of `only`, and all claims on them."""
    measured = read_json(results)["models"]
    print(tables(measured if only is None else {only: measured[only]}))


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
