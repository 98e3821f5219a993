"""The embedded models under three policies, by `python -m dllm_jax.eval`: a table of docs/results.md.

    python -m bench.evaluation --json bench/results/evaluation_cpu.json

Full records, with every answer, stay under --runs; an interrupted run resumes. The JSON keeps what the
records say of models, settings, device, scores and costs.
"""

from pathlib import Path
from typing import Any

import tyro

from bench.shared import runner
from dllm_jax import embedded
from dllm_jax.eval import cli
from dllm_jax.eval.results import record
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.settings import Decoding

POLICIES = ("Policy", "PrefixCache", "DualCache")
DEPTHS = tuple(100 * i / 15 for i in range(16))
FIELDS = ("kind", "settings", "model", "decoding", "batch", "device", "versions", "date", "scores", "totals")


def run(name: str, prompts: int, runs: Path) -> list[dict[str, Any]]:
    """All records of a model."""
    shape = lambda task, length, block: cli.Options(
        Checkpoint(name),
        Decoding(length=length, block=block, batch=16),
        policy=POLICIES,
        out=runs / name / task,
    )
    for block in (4, 8):
        cli.run_tasks(shape(f"chain-{block}", 32, block), "Chain", (7,), prompts)
    cli.run_tasks(shape("few-shot", 4, 2), "FewShot", (5,), prompts)
    repeats = max(prompts // len(DEPTHS), 1)
    cli.run_recall(shape("needle", 4, 2), lengths=(64, 256, 1024), depths=DEPTHS, repeats=repeats)
    order = lambda path: POLICIES.index(path.stem.split("-")[1])
    found = [record.read(path) for path in sorted((runs / name).glob("*/*-*.json"), key=order)]
    return [{key: one[key] for key in FIELDS} for one in found]


def table(records: list[dict[str, Any]]) -> str:
    """A row per model and policy, a column per task, in Markdown."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in records:
        row = rows.setdefault((one["model"]["name"], one["decoding"]["policy"]), {})
        row |= {title(one, group): f"{score:.1%}" for group, score in one["scores"].items()}
    heads = list(dict.fromkeys(head for row in rows.values() for head in row))
    lines = [(*names, *(row.get(head, "-") for head in heads)) for names, row in rows.items()]
    return runner.table(("model", "policy", *heads), "ll" + "r" * len(heads), lines)


def title(one: dict[str, Any], group: str) -> str:
    """Of a column: how long prompts are; of chains, how many tokens are decoded between refreshes."""
    if one["kind"] == "recall":
        return f"needle, {group}"
    return f"chain, blocks of {one['decoding']['block']}" if "chain" in group else "few-shot"


def main(
    models: tuple[str, ...] = embedded.TEXT,
    prompts: int = 256,
    runs: Path = Path("runs/evaluation"),
    json: runner.JsonFile = None,
):
    """Evaluates, writes and prints."""
    records = [one for name in models for one in run(name, prompts, runs)]
    print(table(records))
    runner.write(json, {"records": records})


if __name__ == "__main__":
    tyro.cli(main)
