"""The README's evaluation table: the embedded models under three policies, by `python -m dllm_jax.eval`.

    python -m bench.evaluation --json bench/results/evaluation_cpu.json

Full records, with every answer, stay under --runs; an interrupted run resumes. The JSON keeps what the
records say of models, settings, device, scores and costs.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.console
import rich.table
import tyro

from dllm_jax import embedded
from dllm_jax.eval import cli
from dllm_jax.eval.results import record
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.settings import Decoding

POLICIES = ("Policy", "PrefixCache", "DualCache")
DEPTHS = tuple(100 * i / 15 for i in range(16))
KEPT = ("kind", "settings", "model", "decoding", "batch", "device", "versions", "date", "scores", "totals")


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
    return [{key: one[key] for key in KEPT} for one in found]


def table(records: list[dict[str, Any]]) -> rich.table.Table:
    """A row per model and policy, a column per task, in Markdown."""
    shown = rich.table.Table("model", "policy", box=rich.box.MARKDOWN)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for one in records:
        row = cells.setdefault((one["model"]["name"], one["decoding"]["policy"]), {})
        row |= {title(one, group): f"{score:.1%}" for group, score in one["scores"].items()}
    columns = list(dict.fromkeys(name for row in cells.values() for name in row))
    for name in columns:
        shown.add_column(name, justify="right")
    for (model, policy), row in cells.items():
        shown.add_row(model, policy, *(row.get(name, "-") for name in columns))
    return shown


def title(one: dict[str, Any], group: str) -> str:
    """Of a column: how long prompts are; of chains, how many tokens are decoded between refreshes."""
    if one["kind"] == "recall":
        return f"needle, {group}"
    return f"chain, blocks of {one['decoding']['block']}" if "chain" in group else "few-shot"


def main(
    models: tuple[str, ...] = embedded.NAMES,
    prompts: int = 256,
    runs: Path = Path("runs/evaluation"),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
):
    """Evaluates, writes and prints."""
    records = [one for name in models for one in run(name, prompts, runs)]
    rich.console.Console(width=180).print(table(records))
    if json_file is not None:
        json_file.write_text(json.dumps({"records": records}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
