"""Times every policy over prompt lengths and batches, against the exact decoder and the roofline.

    python -m bench.generate --shape llada-8b --out bench/results/generate_h100.json
    python -m bench.generate --model PATH --policies DualCache MaskKV --prompts 1024 --batches 1
    python -m bench.generate --shape tiny --prompts 32 --batches 1 --length 16 --block 8     (on a CPU)

Single steps are timed by kind (`dllm_jax.check.steps`): a full one, and the first partial one. Whole
generations are interleaved with the exact decoder's. Percentages are of the rates this device reaches in the
same process: in a copy or a matrix-vector product (bandwidth), and in a square product (arithmetic).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import tyro

import dllm_jax as dj
from bench.generate.generation import Generation, Limits, prepare, whole_run
from bench.shared import models, runner
from bench.shared.measure import Grid, Run
from dllm_jax.check import timing
from dllm_jax.check.weights import default_dtype, random_model
from dllm_jax.command_line import run
from dllm_jax.eval.run.settings import Checkpoint
from dllm_jax.provenance import measured_on
from dllm_jax.roofline import Hardware


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
      shape: Model shape of the random weights, a key of `bench.shared.models.SHAPES`.
      model: Checkpoint to use instead: bundled model, directory or hub id.
      dtype: Dtype of the weights. Default: bfloat16 on accelerators, float32 on CPUs.
      grid: the generations; the exact decoder is always among them.
      threshold: Threshold of parallel decoding. Default: a fixed number of tokens per step.
      limits: Number of timed runs, and maximum time of exact ones.
      json: File of the results.
    """

    shape: str = "llada-8b"
    model: str | None = None
    dtype: str | None = None
    grid: Annotated[Grid, tyro.conf.arg(name="")] = Grid()  # noqa: RUF009 (frozen)
    threshold: float | None = None
    limits: Annotated[Limits, tyro.conf.arg(name="")] = Limits()
    json: runner.JsonFile = None

    def run(self, prompt: int, batch: int, policy: dj.policies.Policy) -> Run:
        """One generation of the grid."""
        grid, rate = self.grid, self.threshold
        sampler = dj.samplers.Confidence() if rate is None else dj.samplers.Threshold(rate)
        return Run(prompt, batch, grid.length, grid.block, grid.denoising_steps, policy, sampler)


def measure(model: dj.Model, options: Options, roof: Hardware) -> Iterator[dict[str, Any]]:
    """One row per prompt, batch and policy, the exact decoder first."""
    chosen = options.grid.chosen(model.spec)
    policies = [dj.policies.Policy(), *(policy for policy in chosen if policy.reuses)]
    for prompt, batch in options.grid.shapes():
        exact: Generation | None = None
        for policy in policies:
            run = options.run(prompt, batch, policy)
            case = {"policy": repr(policy), "prompt": prompt, "batch": batch, "sampler": repr(run.chosen)}
            try:
                mine = prepare(model, run, roof, options.limits)
                if not policy.reuses:
                    exact = mine
            except MemoryError as error:
                yield case | {"error": str(error)}
                continue
            yield case | mine.stepwise(roof) | whole_run(mine, exact, options.limits) | mine.storage(roof)


def _step(kind: str, row: runner.Row) -> str:
    """A step's time, its prediction, and the fractions of this device's rates that it reaches."""
    if row[f"{kind}_ms"] is None:
        return "-"
    rates = f"{row[f'{kind}_bandwidth']:.0%} of bandwidth, {row[f'{kind}_arithmetic']:.0%} of arithmetic"
    predicted = row[f"{kind}_predicted_ms"]
    return f"{row[f'{kind}_ms']['median']:.2f} ms (predicted {predicted:.2f}, {rates})"


def _ratio(row: runner.Row) -> str:
    return "{median:.2f}x ({low:.2f} to {high:.2f})".format(**row["over_exact"]) if row["over_exact"] else "-"


def _counted(name: str, form: str) -> Callable[[runner.Row], str]:
    """A cell of a generation that was run."""
    return lambda row: f"{row[name]:{form}}" if row["seconds"] else "-"


COLUMNS: runner.Columns = {
    "policy": lambda row: row["policy"].split("(")[0],
    "prompt": lambda row: row["prompt"],
    "batch": lambda row: row["batch"],
    "full step": lambda row: _step("whole", row),
    "partial step": lambda row: _step("part", row),
    "tokens/s": _counted("tokens_per_s", ".1f"),
    "positions per token": _counted("positions_per_token", ".1f"),
    "forwards": _counted("forwards", ".0f"),
    "over exact": _ratio,
}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Measures the grid."""
    dtype = options.dtype or default_dtype(jax.devices()[0].platform)
    if options.model:
        model = dj.load(Checkpoint(options.model).path, dtype=dtype)
    else:
        model = random_model(models.shape(options.shape), dtype)
    small = options.shape == "tiny" and not options.model
    roof = timing.ceilings(dtype, options.limits.repeats, **({"megabytes": 64, "side": 512} if small else {}))
    where = measured_on(dtype) | {
        "model": options.model or f"{options.shape}, random weights", "spec": dataclasses.asdict(model.spec),
        "length": options.grid.length, "block": str(options.grid.block),
        "steps": options.grid.denoising_steps, "threshold": options.threshold,
        "limits": dataclasses.asdict(options.limits), "ceilings": dataclasses.asdict(roof),
    }  # fmt: skip
    rows = measure(model, options, roof)
    runner.run(rows, COLUMNS, options.json, lambda rows: where | {"rows": rows})


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
