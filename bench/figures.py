"""The figures of one generation: its steps, the whole of it, what it stores, beside what was predicted."""

import dataclasses
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from bench import device
from bench.measure import Kinds, Program, Run, kinds, program
from dllm_jax import roofline
from dllm_jax.roofline import Hardware


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A generation that can be timed.

    Attributes:
      run: what is generated.
      predicted: what it has to do.
      steps: times of its steps.
      program: the compiled loop.
      peak: the most memory the device ever held, if that was in these steps; None if it was before.
    """

    run: Run
    predicted: roofline.Work
    steps: Kinds
    program: Program
    peak: int | None


def prepared(model: dj.Model, run: Run, roof: Hardware, repeats: int, most_seconds: float) -> Prepared:
    """Times the steps and compiles the loop.

    Args:
      model: the model.
      run: what is generated.
      roof: rates and capacity of this device.
      repeats: timed groups of steps.
      most_seconds: an exact generation that would take longer is not run.

    Raises:
      MemoryError: it does not fit by prediction, or the device says so.
    """
    request = run.request(model)
    predicted = roofline.work(model.spec, run.policy, request.layout, run.batch, model.dtype)
    if not predicted.memory.fits(roof):
        raise MemoryError(f"needs {predicted.memory.total / 1e9:.0f} GB by prediction")
    before = device.peak_bytes()
    try:
        steps = kinds(model, request, repeats)
        compiled = program(model, request)
        if steps.whole.median * run.steps <= most_seconds or run.policy.reuses:
            jax.block_until_ready(compiled.run())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise MemoryError("out of memory") from error
        raise
    finally:
        jax.clear_caches()  # programs hold memory
    peak = device.peak_bytes()
    return Prepared(run, predicted, steps, compiled, None if peak == before else peak)


def stepwise(mine: Prepared, roof: Hardware) -> dict[str, Any]:
    """Steps by kind: measured, predicted at the device's own rates, and the share of these rates reached."""
    found: dict[str, Any] = {"width": mine.steps.width}
    for name, time in (("whole", mine.steps.whole), ("part", mine.steps.part)):
        price = next((c for s, _, c in mine.predicted.steps if s.whole is (name == "whole")), None)
        if time is None or price is None:
            found |= {f"{name}_ms": None}
            continue
        found |= {
            f"{name}_ms": dataclasses.asdict(time.scaled(1e3)),
            f"{name}_predicted_ms": 1e3 * price.seconds(roof),
            f"{name}_bandwidth": price.bytes / time.median / roof.bandwidth,
            f"{name}_arithmetic": price.flops / time.median / roof.flops,
        }
    return found | {"predicted_s": mine.predicted.on(roof).seconds}


def whole_run(mine: Prepared, exact: Prepared, repeats: int, most_seconds: float) -> dict[str, Any]:
    """A generation, in turns with the exact decoder's unless that takes too long."""
    by_steps = exact.steps.whole.median * exact.run.steps
    too_long = by_steps > most_seconds
    if too_long and mine is exact:
        return {"seconds": None, "exact_by_steps_s": by_steps}
    runs = {"ours": mine.program.run}
    if not too_long and mine is not exact:
        runs["exact"] = exact.program.run
    times = device.interleaved(runs, repeats)
    ours = times["ours"].median
    base = by_steps if too_long else times["exact" if "exact" in times else "ours"].median
    _, stats, _ = jax.tree.map(np.asarray, mine.program.run())
    refreshes, forwards = float(np.max(stats.refreshes)), float(np.max(stats.nfe))
    others = (forwards - refreshes) * (mine.steps.part.median if mine.steps.part else 0.0)
    return {
        "seconds": dataclasses.asdict(times["ours"]),
        "steps_added_up_s": refreshes * mine.steps.whole.median + others,
        "tokens_per_s": float(np.sum(stats.decoded)) / ours,
        "tokens_before_eos_per_s": float(np.sum(stats.answer)) / ours,
        "forwards": float(np.mean(stats.nfe)),
        "refreshes": float(np.mean(stats.refreshes)),
        "positions_per_token": float(np.sum(stats.computed + stats.widened) / max(np.sum(stats.decoded), 1)),
        "over_exact": base / ours,
        "exact_by_steps_s": by_steps if too_long else None,
    }


def storage(mine: Prepared) -> dict[str, Any]:
    """Compilation and memory."""
    return {
        "lower_s": mine.program.lower_s,
        "compile_s": mine.program.compile_s,
        "program_bytes": mine.program.bytes,
        "device_peak_bytes": mine.peak,
        "predicted_bytes": mine.predicted.memory.total,
    }
