"""Prints recorded programs of bench.compiled: memory, and bytes of steps relative to the roofline's.

python -m bench.compiled.recorded bench/results/compiled_*.json
python -m bench.compiled.recorded --steps bench/results/compiled_*_llada_moe.json      (a line per policy)
python -m bench.compiled.recorded --launches bench/results/compiled_h100_shipped.json   (kernels, host waits)
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.shared import runner
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json

KINDS = ("reuse", "full")
IMPLEMENTATIONS = {
    None: "",
    "cudnn": ", cuDNN",
    "pallas": ", kernels",
    "triton": ", Triton",
    "mosaic_gpu": ", Mosaic GPU",
    "shipped": ", as loaded",
}


def rows(file: Path) -> list[runner.Row]:
    """The rows of a file, each with what the file says of all of them."""
    document = read_json(file)
    common = {"jax": document["jax"], "level": document.get("optimization_level")}
    older = {"images": 0, "weights": None, "widths": None}  # some files were written before there were these
    return [common | older | row for row in document["rows"]]


def program(row: runner.Row) -> str:
    """Describes the target of a program and its settings that are not the default."""
    chips, name = row["tp"] * row["dp"], row["target"]
    if chips > 1:
        name = f"{chips} x {name.upper()}" if name.startswith("h") else f"{name} x {chips}"
    if row["dp"] > 1:
        name += f" (dp {row['dp']}, tp {row['tp']})"
    parts = {
        f", jax {row['jax'][:4]}": row["jax"] >= "0.12",
        f", {row['shape']}": row["shape"] != "llada-8b",
        f", prompt {row['prompt']}": row["prompt"] != 1024,
        f", {row['images']} image": row["images"],
        f", batch {row['batch']}": row["batch"] > 1,
        f", {row['weights']}": row["weights"],
        f", widths {row['widths']}": row["widths"],
        f", {row['level']}": row["level"],
    }
    name += f", {row['layers']} layers" + "".join(part for part, shown in parts.items() if shown)
    return name + IMPLEMENTATIONS[row["implementation"]]


def _of(step: str, field: str, digits: int) -> Any:
    return lambda row: f"{row[step][field]:.{digits}f}" if row.get(step) else "-"


COLUMNS: runner.Columns = {
    "program": program,
    "policy": lambda row: f"`{row['policy']}`",
    "compile, CPU s": lambda row: f"{row['compile_cpu_s']:.0f}",
    "peak, GB per chip": lambda row: f"{row['peak'] / 1e9:.1f}",
    "reuse step": _of("reuse_step", "ratio", 2),
    "beyond L2": _of("reuse_step", "ratio_beyond_cache", 2),
    "entering step": _of("enter_step", "ratio", 2),
    "full step": _of("full_step", "ratio", 2),
    "collectives per layer": _of("full_step", "collectives_per_layer", 1),
}


def of_steps(rows: Iterable[runner.Row]) -> str:
    """A line per policy: what the roofline predicts of its reuse and full steps, and what targets move."""
    rows = [row for row in rows if "error" not in row]
    targets = dict.fromkeys(row["target"] for row in rows)
    costs = {(row["policy"], row["target"], kind): row.get(f"{kind}_step") for row in rows for kind in KINDS}
    heads = ["policy", *(f"{kind} {of}" for kind in KINDS for of in ("GFLOP", "GB", *targets))]

    def cells(policy: str, kind: str) -> list[str]:
        steps = [costs.get((policy, target, kind)) for target in targets]
        if not (predicted := next(filter(None, steps), None)):
            return ["-"] * (2 + len(steps))
        first = [f"{predicted['roofline_flops'] / 1e9:.0f}", f"{predicted['roofline_bytes'] / 1e9:.2f}"]
        return first + [f"{step['bytes'] / 1e9:.2f}" if step else "-" for step in steps]

    policies = dict.fromkeys(row["policy"] for row in rows)
    lines = [[f"`{policy}`", *cells(policy, "reuse"), *cells(policy, "full")] for policy in policies]
    return runner.table(heads, "l" + "r" * (len(heads) - 1), lines)


def of_launches(rows: Iterable[runner.Row]) -> str:
    """A line per program: kernels of a layer by kind of step, host waits in brackets, and kernels outside."""
    heads = ["model", "policy", "full step", "partial step", "outside of layers: full", "partial"]

    def cells(row: runner.Row) -> list[str]:
        steps = [row.get("full_step"), row.get("reuse_step")]
        inside = lambda step: f"{step['kernels_per_layer']} ({step['waits_per_layer']})" if step else "-"
        outside = lambda step: str(step["kernels_outside"]) if step else "-"
        return [row["shape"], f"`{row['policy']}`", *map(inside, steps), *map(outside, steps)]

    return runner.table(heads, "llrrrr", [cells(row) for row in rows if "error" not in row])


def main(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional], steps: bool = False, launches: bool = False
):
    """Prints a table of all programs in the files.

    Args:
      files: Files written by bench.compiled.
      steps: Print a line per policy instead, with the bytes and FLOPs of its steps, for programs of one
        model.
      launches: Print the kernels and host waits of GPU programs instead.
    """
    every = (row for file in files for row in rows(file))
    shown = of_steps if steps else of_launches if launches else lambda rows: runner.table_of(COLUMNS, rows, 2)
    print(shown(every))


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
