"""Prints what `dllm_jax.roofline` predicts for generations on hardware that is not at hand.

python -m bench.roofline
python -m bench.roofline --models llada-8b --hardware h100 --policies DualCache MaskKV --prompts 1024
python -m bench.roofline --batches 1 --markdown     (the tables of docs/performance.md)
python -m bench.roofline --models llada-v-8b --images 1 2 4 --hardware h100 --batches 1 --markdown
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import tyro

import dllm_jax as dj
from bench.shared import runner
from bench.shared.measure import Grid
from bench.shared.models import PIXELS
from dllm_jax import roofline
from dllm_jax.roofline import HARDWARE
from dllm_jax.vision import AnyRes, Pad

NOTE = """
full, partial: milliseconds of a full step and, on average, of the others; ms/token: per token of the batch;
over exact: speed over the exact decoder's; waits: fraction of the time that is memory-bound. Lower bounds at
the full rates of the data sheets, see dllm_jax/roofline."""


class Prompt(NamedTuple):
    """A prompt of the table.

    Attributes:
      positions: in all.
      images: how many of them it has.
      views: that the tower sees.
    """

    positions: int
    images: int = 0
    views: int = 0

    @property
    def head(self) -> str:
        """The prompt as a column's head."""
        if not self.images:
            return f"prompt {self.positions}"
        return f"{self.images} image{'s' * (self.images > 1)}, {self.positions} positions"


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What is predicted.

    Attributes:
      models: names of `dj.presets.model_spec`.
      hardware: names of `dllm_jax.roofline.HARDWARE`.
      grid: the generations.
      images: prompts with so many images each instead of the grid's, for a model with a tower.
      size: width and height of an image, in pixels.
      text: positions of such a prompt besides its images.
      tiled: cut several images into tiles, as one is; the published evaluation has a square for each.
      chips: number of chips that share the work perfectly.
      dtype: of parameters and storage; the rates are those of bfloat16.
      markdown: short tables, a column per prompt length.
      json: results go here.
    """

    models: tuple[str, ...] = ("llada-8b", "dream-7b")
    hardware: tuple[str, ...] = tuple(HARDWARE)
    grid: Annotated[Grid, tyro.conf.arg(name="")] = Grid()  # noqa: RUF009 (frozen)
    images: tuple[int, ...] = ()
    size: tuple[int, int] = PIXELS
    text: int = 64
    tiled: bool = False
    chips: int = 1
    dtype: str = "bfloat16"
    markdown: bool = False
    json: runner.JsonFile = None

    def __post_init__(self):
        if unknown := sorted(set(self.hardware) - set(HARDWARE)):
            raise ValueError(f"hardware {', '.join(unknown)} is not among {', '.join(HARDWARE)}")

    def rows(self, model: str) -> Iterator[dict[str, Any]]:
        """A row per policy, prompt, batch and hardware."""
        spec, chips = dj.presets.model_spec(model), {n: HARDWARE[n].times(self.chips) for n in self.hardware}
        work = lambda policy, prompt, batch: roofline.work(
            spec, policy, self.grid.layout(prompt.positions), batch, self.dtype, views=prompt.views
        )
        shapes = [(prompt, batch) for prompt in self.prompts(model) for batch in self.grid.batches]
        exact = {shape: work(dj.policies.Policy(), *shape) for shape in shapes}
        for policy in self.grid.chosen:
            for prompt, batch in shapes:
                mine = work(policy, prompt, batch)
                images = {"images": prompt.images} if prompt.images else {}
                for name, chip in chips.items():
                    ratio = exact[prompt, batch].on(chip).seconds / mine.on(chip).seconds
                    case = {"model": model, "hardware": name, "policy": type(policy).__name__, **images}
                    case |= {"prompt": prompt.positions, "batch": batch}
                    yield case | figures(mine, chip, ratio)

    def prompts(self, model: str) -> list[Prompt]:
        """The prompts: those of the grid, or those with images."""
        if not self.images:
            return [Prompt(positions) for positions in self.grid.prompts]
        found, several = [], AnyRes() if self.tiled else Pad()
        for count in self.images:
            made = roofline.images(dj.presets.model_spec(model), [self.size] * count, several=several)
            found.append(Prompt(self.text + made.positions, count, made.views))
        return found


def figures(work: roofline.Work, hardware: roofline.Hardware, ratio: float) -> dict[str, Any]:
    """The figures of one generation; gigabytes are 10^9 bytes."""
    times = work.on(hardware)
    return {
        "whole_ms": times.full_ms,
        "part_ms": times.partial_ms,
        "ms_per_token": times.ms_per_token,
        "over_exact": ratio,
        "memory_bound": times.memory_bound,
        **({} if work.tower is None else {"tower_ms": times.tower_ms}),
        "cache_gb": work.memory.cache / 1e9,
        "memory_gb": work.memory.total(hardware) / 1e9,
        "fits": work.memory.fits(hardware),
    }


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
    name = f"{model}, {HARDWARE[hardware].times(forecast.chips).name}"
    if not forecast.markdown:
        grid = forecast.grid
        yield f"\n{name}, length {grid.length}, block {grid.block}, {forecast.dtype}:\n"
        yield runner.table_of(COLUMNS, rows)
        return
    for batch in forecast.grid.batches:
        lines: dict[str, list[str]] = {}
        for row in rows:
            if row["batch"] == batch:
                lines.setdefault(row["policy"], [f"`{row['policy']}`"]).append(short_cell(row))
        heads = ("policy", *(prompt.head for prompt in forecast.prompts(model)))
        yield f"\n{name}, batch {batch}:\n"
        if forecast.images:
            towers = [row for row in rows if (row["batch"], row["policy"]) == (batch, rows[0]["policy"])]
            lines["the tower alone"] = ["the tower alone", *(short(row["tower_ms"]) for row in towers)]
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
    sources = {name: dataclasses.asdict(HARDWARE[name]) for name in forecast.hardware}
    runner.write(forecast.json, {"hardware": sources, "rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
