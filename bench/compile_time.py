"""Compiles whole generations of a real model's shape without allocating it: seconds, bytes, program size.

python -m bench.compile_time llada-8b --json FILE
python -m bench.compile_time llada-8b --layers 2 8 32 --policies Policy DualCache --json FILE
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro

import dllm_jax as dj
from bench.shared import models, runner
from bench.shared.measure import Run, program
from dllm_jax.nn.parameters import abstract

COLUMNS = (
    "policy",
    "layers",
    "step_variants",
    "lower_cpu_s",
    "compile_cpu_s",
    "wall_s",
    "temporary_mib",
    "hlo_kib",
)


def cost(spec: dj.ModelSpec, dtype: str, run: Run) -> dict[str, Any]:
    """Cost of compiling one generation, and size of its program."""
    model = dj.Model(abstract(spec, jnp.dtype(dtype)), spec)
    request = run.request(model)
    made = program(model, request)
    memory, text = made.compiled.memory_analysis(), made.compiled.as_text()
    if memory is None or text is None:
        raise RuntimeError(f"{jax.devices()[0].device_kind} does not say what a program takes")
    return {
        "policy": repr(run.policy),
        "sampler": repr(run.chosen),
        "step_variants": 1 + len(request.plan.widths),
        "lower_cpu_s": round(made.lower.cpu_s, 2),
        "compile_cpu_s": round(made.compile.cpu_s, 2),
        "wall_s": round(made.lower.wall_s + made.compile.wall_s, 2),
        "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "hlo_kib": round(len(text) / 2**10),
        "layers": spec.layers,
    }


def main(
    name: Annotated[str, tyro.conf.Positional] = "llada-8b",
    prompt: int = 1024,
    length: int = 256,
    block: int = 32,
    batch: int = 1,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    layers: tuple[int, ...] = (),
    policies: tuple[str, ...] = (),
    json: runner.JsonFile = None,
):
    """Compiles and prints.

    Args:
      name: a shape, see `bench.shared.models.SHAPES`.
      prompt: positions.
      length: response positions.
      block: positions per block.
      batch: sequences.
      dtype: of the weights.
      layers: numbers of layers to try instead of the model's own.
      policies: class names, all if empty.
      json: results go here.
    """
    spec = models.shape(name)

    def costs() -> Iterator[runner.Row]:
        for policy in models.policies_named(policies):
            run = Run(prompt, batch, length, block, length, policy, dj.samplers.Threshold(0.9))
            for n in layers or (spec.layers,):
                yield cost(dataclasses.replace(spec, layers=n), dtype, run)
                jax.clear_caches()

    where = runner.provenance(dtype) | {
        "model": name,
        "layers": spec.layers,
        "batch": batch,
        "prompt": prompt,
        "length": length,
        "block": block,
    }
    columns = {key: lambda row, key=key: row[key] for key in COLUMNS}
    runner.run(costs(), columns, json, lambda rows: where | {"rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
