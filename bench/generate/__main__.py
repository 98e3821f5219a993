"""Times every policy over prompt lengths and batches, against the exact decoder and the roofline.

    python -m bench.generate --shape llada-8b --out bench/results/generate_h100.json
    python -m bench.generate --model PATH --policies DualCache MaskKV --prompts 1024 --batches 1
    python -m bench.generate --shape tiny --prompts 32 --batches 1 --length 16 --block 8     (on a CPU)

Single steps are timed by kind (`bench.shared.steps`): over the whole canvas, and the first partial one. Whole
generations are interleaved with the exact decoder's. Percentages are of the rates this device reaches in the
same process: in a copy or a matrix-vector product (bandwidth), and in a square product (arithmetic).
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import rich.console
import rich.table
import tyro

import dllm_jax as dj
from bench.generate.prepared import Exact, Limits, baseline, prepared
from bench.generate.row import stepwise, storage, whole_run
from bench.shared import device, models, report
from bench.shared.grid import Grid
from bench.shared.measure import Run
from dllm_jax.roofline import Hardware


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      shape: whose shape the random weights have: llada-8b, dream-7b; tiny, small (for CPUs).
      model: a checkpoint instead: a directory or hub id.
      dtype: bfloat16 on accelerators and float32 on CPUs if not given.
      grid: the generations; the exact decoder is always among them.
      threshold: decode with `Threshold` instead of a fixed number of tokens per step.
      limits: how often generations are timed, and how long exact ones may take.
      out: JSON file, written anew after every measurement.
    """

    shape: str = "llada-8b"
    model: str | None = None
    dtype: str | None = None
    grid: Annotated[Grid, tyro.conf.arg(name="")] = Grid()  # noqa: RUF009 (frozen)
    threshold: float | None = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = Limits()
    out: Path | None = None

    def run(self, prompt: int, batch: int, policy: dj.policies.Policy) -> Run:
        """One generation of the grid."""
        sampler = (
            dj.samplers.Confidence() if self.threshold is None else dj.samplers.Threshold(self.threshold)
        )
        grid = self.grid
        return Run(prompt, batch, grid.length, grid.block, grid.denoising_steps, policy, sampler)


def measure(model: dj.Model, options: Options, roof: Hardware) -> Iterator[dict[str, Any]]:
    """One row per prompt, batch and policy, the exact decoder first."""
    policies = [dj.policies.Policy(), *(policy for policy in options.grid.chosen if policy.reuses)]
    for prompt, batch in options.grid.shapes():
        exact: Exact | None = None
        for policy in policies:
            run = options.run(prompt, batch, policy)
            case = {"policy": repr(policy), "prompt": prompt, "batch": batch, "sampler": repr(run.chosen)}
            try:
                mine = prepared(model, run, roof, options.limits)
                if not policy.reuses:
                    exact = baseline(mine, options.limits)
            except MemoryError as error:
                yield case | {"error": str(error)}
                continue
            yield case | stepwise(mine, roof) | whole_run(mine, exact, options.limits) | storage(mine)


def print_row(console: rich.console.Console, found: dict[str, Any]):
    """Prints the main figures of a row on one line."""
    name = f"{found['policy'].split('(')[0]:12} prompt {found['prompt']:5} batch {found['batch']:3}"
    if "error" in found:
        console.print(f"{name}  {found['error']}")
        return
    parts = [name]
    for kind in ("whole", "part"):
        if time := found[f"{kind}_ms"]:
            parts.append(
                f"{kind} {time['median']:8.2f} ms (predicted {found[f'{kind}_predicted_ms']:.2f}, bandwidth "
                f"{found[f'{kind}_bandwidth']:.0%}, arithmetic {found[f'{kind}_arithmetic']:.0%})"
            )
    if "tokens_per_s" in found:
        parts.append(f"{found['tokens_per_s']:.1f} tokens/s")
    if ratio := found["over_exact"]:
        parts.append(f"{ratio['median']:.2f} x exact ({ratio['low']:.2f} to {ratio['high']:.2f})")
    console.print("  ".join(parts))


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Measures the grid."""
    dtype = options.dtype or report.default_dtype()
    if options.model:
        model = dj.load(options.model, dtype=dtype)
    else:
        model = models.random_model(models.shape(options.shape), dtype)
    small = options.shape == "tiny" and not options.model
    roof = device.ceilings(dtype, options.limits.repeats, **({"megabytes": 64, "side": 512} if small else {}))
    where = report.provenance(dtype) | {
        "model": options.model or f"{options.shape}, random weights",
        "spec": dataclasses.asdict(model.spec),
        "length": options.grid.length,
        "block": options.grid.block,
        "steps": options.grid.denoising_steps,
        "threshold": options.threshold,
        "limits": dataclasses.asdict(options.limits),
        "ceilings": dataclasses.asdict(roof),
        "data_sheet": device.nominal(jax.devices()[0].device_kind),
    }
    console = rich.console.Console(width=200, highlight=False)
    console.print({k: v for k, v in where.items() if k != "spec"})
    rows = []
    for found in measure(model, options, roof):
        rows.append(found)
        print_row(console, found)
        report.write(options.out, where, rows=rows)


if __name__ == "__main__":
    tyro.cli(main)
