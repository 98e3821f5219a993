"""Generations prepared for timing: predicted work, step times, compiled loop."""

import dataclasses
from typing import Any

import jax

import dllm_jax as dj
from bench.shared import device
from bench.shared.device import Time
from bench.shared.measure import Program, Run, program
from bench.shared.steps import Kinds, kinds
from dllm_jax import roofline
from dllm_jax.roofline import Hardware

DATA_DEPENDENT = (dj.policies.ElasticCache, dj.policies.D2Cache)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often generations are timed, and how long exact ones may take.

    Attributes:
      repeats: timed runs.
      turns_seconds: exact generations up to this long are interleaved with every policy's; others run once.
      most_seconds: exact generations longer than this are not run.
    """

    repeats: int = 5
    turns_seconds: float = 15.0
    most_seconds: float = 900.0


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A generation ready to be timed.

    Attributes:
      run: what is generated.
      predicted: its work.
      steps: times of its steps.
      program: the compiled loop.
      out: output of a warm-up run; None if that would take too long.
      peak: peak device memory, if this generation raised it; None otherwise.
    """

    run: Run
    predicted: roofline.Work
    steps: Kinds
    program: Program
    out: Any = None
    peak: int | None = None

    @property
    def at_most(self) -> float:
        """Seconds if every step of the schedule recomputed the whole canvas: an upper bound."""
        return self.steps.whole.median * self.run.steps

    @property
    def uniform(self) -> bool:
        """Besides whole-canvas steps there is at most one other kind, whatever the data."""
        others = {step for step, _, _ in self.predicted.steps if not step.full}
        return len(others) < 2 and not isinstance(self.run.policy, DATA_DEPENDENT)


@dataclasses.dataclass(frozen=True)
class Exact:
    """The exact decoder of the same prompts.

    Attributes:
      mine: its generation.
      once: its time, if it is too long to be interleaved but short enough to run once.
      out: output of that run.
    """

    mine: Prepared
    once: Time | None
    out: Any = None


def prepared(model: dj.Model, run: Run, roof: Hardware, limits: Limits) -> Prepared:
    """Times the steps and compiles the loop.

    Args:
      model: the model.
      run: what is generated.
      roof: rates and capacity of this device.
      limits: an exact generation that exceeds them is not run.

    Raises:
      MemoryError: predicted or actual lack of memory.
    """
    request = run.request(model)
    predicted = roofline.work(model.spec, run.policy, request.layout, run.batch, model.dtype)
    if not predicted.memory.fits(roof):
        raise MemoryError(f"needs {predicted.memory.total / 1e9:.0f} GB by prediction")
    before = device.peak_bytes()
    try:
        steps = kinds(model, request, limits.repeats)
        mine = Prepared(run, predicted, steps, program(model, request))
        if run.policy.reuses or mine.at_most <= limits.turns_seconds:
            mine = dataclasses.replace(mine, out=jax.block_until_ready(mine.program.run()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise MemoryError("out of memory") from error
        raise
    finally:
        jax.clear_caches()  # programs hold memory
    peak = device.peak_bytes()
    return dataclasses.replace(mine, peak=None if peak == before else peak)


def baseline(mine: Prepared, limits: Limits) -> Exact:
    """The exact decoder, timed once if it is too long to be interleaved."""
    if not limits.turns_seconds < mine.at_most <= limits.most_seconds:
        return Exact(mine, None)
    out = []
    taken = device.seconds(lambda: out.append(mine.program.run()) or out)
    return Exact(mine, Time.of([taken]), out[0])
