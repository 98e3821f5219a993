"""Prints recorded programs of bench.compiled: memory, and bytes of steps relative to the roofline's.

python -m bench.compiled.recorded bench/results/compiled_*.json
"""

from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.shared import runner
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json

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


def of_step(step: str, field: str, digits: int = 0, scale: float = 1) -> Any:
    """A column: a field of a kind of step, or a dash for programs without it."""
    return lambda row: f"{row[step][field] * scale:.{digits}f}" if field in row.get(step, ()) else "-"


COLUMNS: runner.Columns = {
    "program": program,
    "policy": lambda row: f"`{row['policy']}`",
    "compile, CPU s": lambda row: f"{row['compile_cpu_s']:.0f}",
    "peak, GB per chip": lambda row: f"{row['peak'] / 1e9:.1f}",
    "partial step": of_step("reuse_step", "ratio", 2),
    "beyond L2": of_step("reuse_step", "ratio_beyond_cache", 2),
    "entering step": of_step("enter_step", "ratio", 2),
    "full step": of_step("full_step", "ratio", 2),
    "collectives per layer": of_step("full_step", "collectives_per_layer", 1),
}


def main(files: Annotated[tuple[Path, ...], tyro.conf.Positional]):
    """Prints a table of all programs in the files.

    Args:
      files: Files written by bench.compiled.
    """
    print(runner.table_of(COLUMNS, (row for file in files for row in rows(file)), 2))


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
