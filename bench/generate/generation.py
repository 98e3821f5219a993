"""A generation made ready for timing, and the fields of its row in the results of bench.generate."""

import dataclasses
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from bench.shared.measure import Run
from dllm_jax import roofline
from dllm_jax.check import timing
from dllm_jax.check.steps import Program, StepTimes, program, step_times
from dllm_jax.check.timing import Time
from dllm_jax.roofline import Hardware


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often generations are timed, and how long exact ones may take.

    Attributes:
      repeats: Number of timed runs.
      turns_seconds: Maximum seconds of exact generations that are interleaved with others; the steps of
        longer ones are added up.
    """

    repeats: int = 5
    turns_seconds: float = 15.0


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation ready to be timed: its predicted work, the times of its steps, and the compiled loop.

    `out` is the output of a warm-up run, None of an exact generation that takes too long; `peak` the peak of
    device memory, if this generation raised it.
    """

    run: Run
    predicted: roofline.Work
    steps: StepTimes
    program: Program
    out: Any = None
    peak: int | None = None

    @property
    def upper_bound(self) -> float:
        """Seconds if every step of the schedule were a full one."""
        return self.steps.full.median * self.run.steps

    def stepwise(self, roof: Hardware) -> dict[str, Any]:
        """Steps by kind: measured, predicted at the device's own rates, and the fraction of those reached."""
        columns: dict[str, Any] = {"width": self.steps.width}
        for name, time in (("whole", self.steps.full), ("part", self.steps.partial)):
            price = next((c for s, _, c in self.predicted.steps if s.full is (name == "whole")), None)
            if time is None or price is None:
                columns |= {f"{name}_ms": None}
                continue
            milliseconds, predicted = dataclasses.asdict(time.scaled(1e3)), 1e3 * price.seconds(roof)
            columns |= {f"{name}_ms": milliseconds, f"{name}_predicted_ms": predicted}
            columns[f"{name}_bandwidth"] = price.moving(roof) / time.median
            columns[f"{name}_arithmetic"] = price.computing(roof) / time.median
        fixed = self.run.fixed_steps
        return columns | {"predicted_s": self.predicted.on(roof).seconds if fixed else None}

    def statistics(self, time: Time, out: Any) -> dict[str, Any]:
        """Counts and rates."""
        stats = jax.tree.map(np.asarray, out[1])
        decoded, computed = np.sum(stats.decoded_tokens), np.sum(stats.computed_tokens + stats.widened_tokens)
        return {
            "tokens_per_s": float(decoded) / time.median,
            "tokens_before_eos_per_s": float(np.sum(stats.answer_tokens)) / time.median,
            "forwards": float(np.mean(stats.nfe)),
            "refreshes": float(np.mean(stats.refreshes)),
            "positions_per_token": float(computed / max(decoded, 1)),
        }

    def storage(self, roof: Hardware) -> dict[str, Any]:
        """Compile times and memory."""
        made = self.program
        return {
            "lower_s": made.lower_s, "compile_s": made.compile_s, "program_bytes": made.bytes,
            "device_peak_bytes": self.peak, "predicted_bytes": self.predicted.memory.total(roof),
        }  # fmt: skip


def prepare(model: dj.Model, run: Run, roof: Hardware, limits: Limits) -> Generation:
    """Times the steps, compiles the loop, and runs it unless it is an exact one that exceeds the limits.

    Raises:
      MemoryError: predicted or actual lack of memory.
    """
    request = run.request(model)
    predicted = roofline.work(model.spec, run.policy, request.plan.layout, run.batch, model.dtype)
    if not predicted.memory.fits(roof):
        raise MemoryError(f"needs {predicted.memory.total(roof) / 1e9:.0f} GB by prediction")
    before = timing.peak_bytes()
    try:
        steps = step_times(model, request, limits.repeats)
        mine = Generation(run, predicted, steps, program(model, request))
        if run.policy.reuses or mine.upper_bound <= limits.turns_seconds:
            mine = dataclasses.replace(mine, out=jax.block_until_ready(mine.program.run()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise MemoryError("out of memory") from error
        raise
    finally:
        jax.clear_caches()  # programs hold memory
    peak = timing.peak_bytes()
    return dataclasses.replace(mine, peak=None if peak == before else peak)


def whole_run(mine: Generation, exact: Generation | None, limits: Limits) -> dict[str, Any]:
    """Times a generation in turns with the exact decoder's of the same prompts, and their ratios.

    If the exact decoder is too slow for turns, its step time times the number of steps stands for it, where
    that number is fixed; else, and without an exact decoder, there is no ratio.
    """
    by_steps = None
    if exact is not None and exact.out is None and mine.run.fixed_steps:
        by_steps = exact.upper_bound
    if mine.out is None:
        return {"seconds": None, "over_exact": None, "exact_seconds": None, "exact_by_steps_s": by_steps}
    runs = {"ours": mine.program.run}
    if exact is not None and exact is not mine and exact.out is not None:
        runs["exact"] = exact.program.run
    times = timing.interleaved(runs, limits.repeats)
    ours = times["ours"]
    base = ours if exact is mine else times.get("exact")
    compared = Time.of([by_steps]) if by_steps else base
    over = compared and dataclasses.asdict(compared.over(ours))
    return mine.statistics(ours, mine.out) | {
        "seconds": dataclasses.asdict(ours), "over_exact": over,
        "exact_seconds": base and dataclasses.asdict(base), "exact_by_steps_s": by_steps,
    }  # fmt: skip
