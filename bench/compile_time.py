"""Compiles whole generations of a real model's shape without allocating it: seconds, bytes, program size.

python -m bench.compile_time llada-8b --json FILE
python -m bench.compile_time llada-8b --layers 2 8 32 --policies Policy DualCache --json FILE
"""

import dataclasses
import resource
import time
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import rich.console
import rich.table
import tyro

import dllm_jax as dj
from bench import report
from bench.models import policies_named
from dllm_jax.engine import denoise
from dllm_jax.parameters import abstract
from dllm_jax.step import Plan


def compiled(model: dj.Model, layout: dj.Layout, policy: dj.policies.Policy, batch: int) -> dict:
    """Costs of compiling one generation; CPU seconds leave out what other processes take."""
    widths = policy.widths(layout) if policy.reuses else ()
    sampler = dj.samplers.RandomOrder() if policy.foresees else dj.samplers.Threshold(0.9)
    plan = Plan(policy, sampler, widths, stop_at_eos=False, trace=False)
    tokens = jax.ShapeDtypeStruct((batch, layout.length), jnp.int32)
    valid = jax.ShapeDtypeStruct((batch, layout.length), bool)
    noise = jax.eval_shape(lambda: dj.samplers.KeyNoise(jax.random.split(jax.random.key(0), batch)))
    cpu, wall = _cpu(), time.perf_counter()
    lowered = denoise.lower(model, tokens, valid, noise if sampler.draws else None, layout=layout, plan=plan)
    middle = _cpu()
    program = lowered.compile()
    memory, text = program.memory_analysis(), program.as_text()
    if memory is None or text is None:
        raise RuntimeError(f"{jax.devices()[0].device_kind} does not say what a program takes")
    return {
        "policy": repr(policy),
        "sampler": repr(sampler),
        "step_variants": 1 + len(widths),
        "lower_cpu_s": round(middle - cpu, 2),
        "compile_cpu_s": round(_cpu() - middle, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "hlo_kib": round(len(text) / 2**10),
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
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
):
    """Compiles and prints.

    Args:
      name: of a model's shape.
      prompt: positions.
      length: response positions.
      block: positions per block.
      batch: sequences.
      dtype: of the weights.
      layers: cut to so many, one after another; the model's own if empty.
      policies: class names, all if empty.
      json_file: where the results go.
    """
    spec, layout = dj.presets.model_spec(name), dj.Layout(prompt, length, block, length)
    rows = []
    for policy in policies_named(policies):
        for n in layers or (spec.layers,):
            cut = dataclasses.replace(spec, layers=n)
            row = compiled(dj.Model(abstract(cut, jnp.dtype(dtype)), cut), layout, policy, batch)
            rows.append(row | {"layers": n})
            jax.clear_caches()
    where = report.provenance(dtype) | {
        "model": name,
        "layers": spec.layers,
        "batch": batch,
        "prompt": prompt,
        "length": length,
        "block": block,
    }
    columns = [name for name in rows[0] if name != "sampler"]
    table = rich.table.Table(*columns, title=", ".join(f"{k} {v}" for k, v in where.items()))
    for row in rows:
        table.add_row(*(str(row[name]) for name in columns))
    rich.console.Console().print(table)
    report.write(json_file, where, rows=rows)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    tyro.cli(main)
