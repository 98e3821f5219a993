"""Prints what `dllm_jax.roofline` predicts for generations on hardware that is not at hand.

python -m bench.roofline
python -m bench.roofline --models llada-8b --hardware h100 --policies DualCache MaskKV --prompts 1024
python -m bench.roofline --batches 1 --markdown     (the tables of docs/background/performance.md)
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

import dllm_jax as dj
from bench.shared import runner
from bench.shared.measure import Grid
from dllm_jax import roofline
from dllm_jax.command_line import run
from dllm_jax.provenance import measured_on
from dllm_jax.roofline import HARDWARE

NOTE = """
full, partial: milliseconds of a full step and, on average, of the others; ms/token: per token of the batch;
over exact: speed over the exact decoder's; waits: fraction of the time that is memory-bound. Lower bounds at
the full rates of the data sheets, see dllm_jax/roofline."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Options of the prediction.

    Attributes:
      models: Names of `dj.presets.model_spec`.
      hardware: Names of `dllm_jax.roofline.HARDWARE`.
      grid: Generations to predict.
      chips: Number of chips that share the work perfectly.
      dtype: Dtype of parameters and storage; rates are those of bfloat16.
      markdown: Print short tables, a column per prompt length.
      json: File of the results.
    """

    models: tuple[str, ...] = ("llada-8b", "dream-7b")
    hardware: tuple[str, ...] = tuple(HARDWARE)
    grid: Annotated[Grid, tyro.conf.arg(name="")] = Grid()  # noqa: RUF009 (frozen)
    chips: int = 1
    dtype: str = "bfloat16"
    markdown: bool = False
    json: runner.JsonFile = None

    def __post_init__(self):
        if unknown := sorted(set(self.hardware) - set(HARDWARE)):
            raise ValueError(f"hardware {', '.join(unknown)} is not among {', '.join(HARDWARE)}")

    def rows(self, model: str) -> Iterator[dict[str, Any]]:
        """A row per policy, prompt, batch and hardware; gigabytes are 10^9 bytes."""
        spec, chips = dj.presets.model_spec(model), {n: HARDWARE[n].times(self.chips) for n in self.hardware}
        work = lambda policy, prompt, batch: roofline.work(
            spec, policy, self.grid.layout(prompt), batch, self.dtype
        )
        exact = {shape: work(dj.policies.Policy(), *shape) for shape in self.grid.shapes()}
        for policy in self.grid.chosen(spec):
            for prompt, batch in self.grid.shapes():
                mine = work(policy, prompt, batch)
                for name, chip in chips.items():
                    times, memory = mine.on(chip), mine.memory
                    yield {
                        "model": model, "hardware": name, "policy": type(policy).__name__, "prompt": prompt,
                        "batch": batch, "whole_ms": times.full_ms, "part_ms": times.partial_ms,
                        "ms_per_token": times.ms_per_token,
                        "over_exact": exact[prompt, batch].on(chip).seconds / times.seconds,
                        "memory_bound": times.memory_bound, "cache_gb": memory.cache / 1e9,
                        "memory_gb": memory.total(chip) / 1e9, "fits": memory.fits(chip),
                    }  # fmt: skip


def short(value: float | None) -> str:
    """About three digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


COLUMNS: runner.Columns = {
    "policy": lambda row: row["policy"],
    "prompt": lambda row: row["prompt"],
    "batch": lambda row: row["batch"],
    "full": lambda row: short(row["whole_ms"]),
    "partial": lambda row: short(row["part_ms"]),
    "ms/token": lambda row: short(row["ms_per_token"]),
    "over exact": lambda row: short(row["over_exact"]),
    "waits": lambda row: f"{row['memory_bound']:.0%}",
    "cache, GB": lambda row: f"{row['cache_gb']:.1f}",
    "all, GB": lambda row: f"{row['memory_gb']:.0f}",
    "fits": lambda row: "yes" if row["fits"] else "no",
}


def tables(forecast: Forecast, model: str, hardware: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown of one model on one kind of hardware; with `markdown` a table per batch."""
    name, grid = f"{model}, {HARDWARE[hardware].times(forecast.chips).name}", forecast.grid
    if not forecast.markdown:
        yield f"\n{name}, length {grid.length}, block {grid.block}, {forecast.dtype}:\n"
        yield runner.table_of(COLUMNS, rows)
        return
    for batch in forecast.grid.batches:
        lines: dict[str, list[str]] = {}
        for row in rows:
            if row["batch"] == batch:
                lines.setdefault(row["policy"], [f"`{row['policy']}`"]).append(short_cell(row))
        heads = ("policy", *(f"prompt {positions}" for positions in forecast.grid.prompts))
        yield f"\n{name}, batch {batch}:\n"
        yield runner.table(heads, "l" + "r" * (len(heads) - 1), lines.values())


def short_cell(row: dict[str, Any]) -> str:
    """Partial step (exact decoder: full step) / ms per token (ratio); a star if it does not fit."""
    step = row["whole_ms"] if row["part_ms"] is None else row["part_ms"]
    text = f"{short(step)} / {short(row['ms_per_token'])} ({short(row['over_exact'])}x)"
    return text if row["fits"] else text + " *"


def main(forecast: Annotated[Forecast, tyro.conf.arg(name="")]):
    """Prints the predictions."""
    rows: list[dict[str, Any]] = []
    for model in forecast.models:
        rows += forecast.rows(model)
        for hardware in forecast.hardware:
            mine = [row for row in rows if (row["model"], row["hardware"]) == (model, hardware)]
            print("\n".join(tables(forecast, model, hardware, mine)))
    if not forecast.markdown:
        print(NOTE)
    where = measured_on(forecast.dtype) | {"device": "none: predictions"}
    sources = {name: dataclasses.asdict(HARDWARE[name]) for name in forecast.hardware}
    runner.write(forecast.json, where | {"hardware": sources, "rows": rows})


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
