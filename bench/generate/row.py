"""The fields of a row of bench.generate: steps, whole generation, memory, and the predictions for them."""

import dataclasses
from typing import Any

import jax
import numpy as np

from bench.generate.prepared import Exact, Limits, Prepared
from bench.shared import device
from bench.shared.device import Time
from dllm_jax.roofline import Hardware


def stepwise(mine: Prepared, roof: Hardware) -> dict[str, Any]:
    """Steps by kind: measured, predicted at the device's own rates, and the share of those rates reached."""
    found: dict[str, Any] = {"width": mine.steps.width}
    for name, time in (("whole", mine.steps.whole), ("part", mine.steps.part)):
        price = next((c for s, _, c in mine.predicted.steps if s.full is (name == "whole")), None)
        if time is None or price is None:
            found |= {f"{name}_ms": None}
            continue
        found |= {
            f"{name}_ms": dataclasses.asdict(time.scaled(1e3)),
            f"{name}_predicted_ms": 1e3 * price.seconds(roof),
            f"{name}_bandwidth": price.moving(roof) / time.median,
            f"{name}_arithmetic": price.computing(roof) / time.median,
        }
    fixed = mine.run.fixed_steps
    return found | {"predicted_s": mine.predicted.on(roof).seconds if fixed else None}


def whole_run(mine: Prepared, exact: Exact | None, limits: Limits) -> dict[str, Any]:
    """Times a generation, interleaved with the exact decoder unless that is too slow.

    It is compared with the exact decoder's run of the same turn, else with its only run, else, if the number
    of steps is fixed, with that times its step time. Without an exact decoder there is no ratio.
    """
    is_exact = exact is not None and exact.mine is mine
    if exact and is_exact and mine.at_most > limits.turns_seconds:
        once = exact.once
        found = {"seconds": once and dataclasses.asdict(once)} | _beside(exact, once, mine, once)
        return found | (statistics(mine, once, exact.out) if once else {})
    runs = {"ours": mine.program.run}
    if exact and not is_exact and exact.mine.at_most <= limits.turns_seconds:
        runs["exact"] = exact.mine.program.run
    times = device.interleaved(runs, limits.repeats)
    ours = times["ours"]
    base = ours if is_exact else times.get("exact", exact.once if exact else None)
    found = {"seconds": dataclasses.asdict(ours)} | statistics(mine, ours, mine.out)
    return found | _beside(exact, base, mine, ours)


def _beside(exact: Exact | None, base: Time | None, mine: Prepared, ours: Time | None) -> dict[str, Any]:
    """The exact decoder's time, and its ratio to ours."""
    by_steps = None
    if exact and base is None and mine.run.fixed_steps:
        by_steps = exact.mine.at_most
    compared = Time.of([by_steps]) if by_steps else base
    ratio = compared.over(ours) if ours and compared else None
    return {
        "over_exact": ratio and dataclasses.asdict(ratio),
        "exact_seconds": base and dataclasses.asdict(base),
        "exact_by_steps_s": by_steps,
    }


def statistics(mine: Prepared, ours: Time, out: Any) -> dict[str, Any]:
    """Counts and rates; with at most two kinds of steps, also the sum of the step times."""
    _, stats, _ = jax.tree.map(np.asarray, out)
    refreshes, forwards = float(np.max(stats.refreshes)), float(np.max(stats.nfe))
    part = mine.steps.part.median if mine.steps.part else 0.0
    added = refreshes * mine.steps.whole.median + (forwards - refreshes) * part
    return {
        "steps_added_up_s": added if mine.uniform else None,
        "tokens_per_s": float(np.sum(stats.decoded)) / ours.median,
        "tokens_before_eos_per_s": float(np.sum(stats.answer)) / ours.median,
        "forwards": float(np.mean(stats.nfe)),
        "refreshes": float(np.mean(stats.refreshes)),
        "positions_per_token": float(np.sum(stats.computed + stats.widened) / max(np.sum(stats.decoded), 1)),
    }


def storage(mine: Prepared) -> dict[str, Any]:
    """Compile times and memory."""
    return {
        "lower_s": mine.program.lower.wall_s,
        "compile_s": mine.program.compile.wall_s,
        "program_bytes": mine.program.bytes,
        "device_peak_bytes": mine.peak,
        "predicted_bytes": mine.predicted.memory.total,
    }
