"""What generations must take on hardware that is not at hand: the plan of `dllm_jax.roofline`.

python -m bench.roofline
python -m bench.roofline --models llada-8b --hardware h100 --policies DualCache MaskKV --prompts 1024
python -m bench.roofline --batches 1 --markdown     (the tables of docs/performance.md)
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import rich.console
import rich.table
import tyro

import dllm_jax as dj
from dllm_jax import roofline
from dllm_jax.roofline import HARDWARE


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
      models: names of `dj.presets.model_spec`.
      hardware: names of `dllm_jax.roofline.HARDWARE`.
      policies: class names, with their defaults; all if empty.
      prompts: prompt lengths.
      batches: sequences at a time.
      length: response positions.
      block: positions per block.
      steps: denoising steps, as many as there are positions if not given.
      chips: that share the work ideally.
      dtype: of parameters and storage; the rates are those of bfloat16.
    """

    models: tuple[str, ...] = ("llada-8b", "dream-7b")
    hardware: tuple[str, ...] = tuple(HARDWARE)
    policies: tuple[str, ...] = ()
    prompts: tuple[int, ...] = (1024, 4096, 16384, 32768)
    batches: tuple[int, ...] = (1, 8, 32)
    length: int = 256
    block: int = 32
    steps: int | None = None
    chips: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self):
        unknown = set(self.hardware) - set(HARDWARE)
        unknown |= set(self.policies) - {type(policy).__name__ for policy in dj.policies.ALL}
        if unknown:
            raise ValueError(f"unknown hardware or policies: {', '.join(sorted(unknown))}")

    def chosen(self) -> list[dj.policies.Policy]:
        """The policies."""
        return [p for p in dj.policies.ALL if type(p).__name__ in self.policies or not self.policies]

    def layout(self, prompt: int) -> dj.Layout:
        """The geometry of one prompt length."""
        return dj.Layout(prompt, self.length, self.block, self.steps or self.length)


def rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """One row per model, policy, prompt, batch and hardware."""
    chips = {name: HARDWARE[name].times(plan.chips) for name in plan.hardware}
    for model in plan.models:
        spec = dj.presets.model_spec(model)
        for prompt in plan.prompts:
            for batch in plan.batches:
                args = plan.layout(prompt), batch, plan.dtype
                exact = roofline.work(spec, dj.policies.Policy(), *args)
                for policy in plan.chosen():
                    work = roofline.work(spec, policy, *args)
                    for name, hardware in chips.items():
                        ratio = exact.on(hardware).seconds / work.on(hardware).seconds
                        case = {"model": model, "hardware": name, "policy": type(policy).__name__}
                        yield case | {"prompt": prompt, "batch": batch} | row(work, hardware, ratio)


def row(work: roofline.Work, hardware: roofline.Hardware, ratio: float) -> dict[str, Any]:
    """The figures of one generation; gigabytes are 10^9 bytes."""
    times = work.on(hardware)
    return {
        "whole_ms": times.whole_ms,
        "part_ms": times.part_ms,
        "ms_per_token": times.ms_per_token,
        "over_exact": ratio,
        "memory_bound": times.memory_bound,
        "cache_gb": work.memory.cache / 1e9,
        "memory_gb": work.memory.total / 1e9,
        "fits": work.memory.fits(hardware),
    }


HEADINGS = (
    "policy",
    "prompt",
    "batch",
    "whole",
    "part",
    "ms/token",
    "x exact",
    "waits",
    "cache",
    "all GB",
    "fits",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of HEADINGS."""
    part = "-" if row["part_ms"] is None else short(row["part_ms"])
    return [
        row["policy"],
        str(row["prompt"]),
        str(row["batch"]),
        short(row["whole_ms"]),
        part,
        short(row["ms_per_token"]),
        short(row["over_exact"]),
        f"{row['memory_bound']:.0%}",
        f"{row['cache_gb']:.1f}",
        f"{row['memory_gb']:.0f}",
        "yes" if row["fits"] else "no",
    ]


def short(value: float) -> str:
    """Three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def print_plan(console: rich.console.Console, plan: Plan, found: list[dict[str, Any]]):
    """One table per model and hardware."""
    for model in plan.models:
        for name in plan.hardware:
            chip = HARDWARE[name].times(plan.chips)
            title = f"{model} on {chip.name}, length {plan.length}, block {plan.block}, {plan.dtype}"
            table = rich.table.Table(title=title)
            for heading in HEADINGS:
                table.add_column(heading, justify="left" if heading == "policy" else "right")
            mine = [r for r in found if (r["model"], r["hardware"]) == (model, name)]
            for policy in dict.fromkeys(r["policy"] for r in mine):
                for r in mine:
                    if r["policy"] == policy:
                        table.add_row(*cells(r))
                table.add_section()
            console.print(table)
    console.print(
        "Milliseconds of a step over the canvas (whole) and of the others on average (part); of the batch's "
        "tokens (ms/token); generations per time over the exact decoder's (x exact); share of the time that "
        "waits for memory (waits). Lower bounds at the full rates of the data sheets, see dllm_jax/roofline."
    )


def print_markdown(plan: Plan, found: list[dict[str, Any]]):
    """Per model, hardware and batch: ms of the part step, ms per token, ratio over the exact decoder."""
    for model in plan.models:
        for name in plan.hardware:
            for batch in plan.batches:
                print(f"\n{model}, {HARDWARE[name].times(plan.chips).name}, batch {batch}:\n")
                print("| policy |" + "".join(f" prompt {prompt} |" for prompt in plan.prompts))
                print("|---|" + "---:|" * len(plan.prompts))
                about = {"model": model, "hardware": name, "batch": batch}
                mine = [r for r in found if about.items() <= r.items()]
                for policy in dict.fromkeys(r["policy"] for r in mine):
                    row = [markdown_cell(r) for r in mine if r["policy"] == policy]
                    print(f"| `{policy}` | " + " | ".join(row) + " |")


def markdown_cell(row: dict[str, Any]) -> str:
    """Part step (of the exact decoder the whole one) / ms per token (ratio); a star: does not fit."""
    step = row["whole_ms"] if row["part_ms"] is None else row["part_ms"]
    text = f"{short(step)} / {short(row['ms_per_token'])} ({short(row['over_exact'])}x)"
    return text if row["fits"] else text + " *"


def main(
    plan: Annotated[Plan, tyro.conf.arg(name="")],
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    markdown: bool = False,
):
    """Prints the plan, with --markdown as short tables."""
    found = list(rows(plan))
    if markdown:
        print_markdown(plan, found)
    else:
        print_plan(rich.console.Console(width=100), plan, found)
    if json_file:
        sources = {name: dataclasses.asdict(HARDWARE[name]) for name in plan.hardware}
        json_file.write_text(json.dumps({"hardware": sources, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
