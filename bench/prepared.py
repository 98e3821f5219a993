"""Generations made ready to be timed: what they have to do, their steps, their compiled loop."""

import dataclasses
from typing import Any

import jax

import dllm_jax as dj
from bench import device
from bench.device import Time
from bench.measure import Program, Run, program
from bench.steps import Kinds, kinds
from dllm_jax import roofline
from dllm_jax.roofline import Hardware

DATA_DEPENDENT = (dj.policies.ElasticCache, dj.policies.D2Cache)


@dataclasses.dataclass(frozen=True)
class Limits:
    """How often, and up to where, exact generations are timed.

    Attributes:
      repeats: timed runs.
      turns_seconds: exact generations of at most so long take turns with every policy's; others run once.
      most_seconds: even longer ones are not run.
    """

    repeats: int = 5
    turns_seconds: float = 15.0
    most_seconds: float = 900.0


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A generation that can be timed.

    Attributes:
      run: what is generated.
      predicted: what it has to do.
      steps: times of its steps.
      program: the compiled loop.
      out: of its first run, which loads everything; None if that would take too long untimed.
      peak: the most memory the device ever held, if that was in these steps; None if it was before.
    """

    run: Run
    predicted: roofline.Work
    steps: Kinds
    program: Program
    out: Any = None
    peak: int | None = None

    @property
    def at_most(self) -> float:
        """Seconds of all its steps, were they over the canvas and their number the schedule's."""
        return self.steps.whole.median * self.run.steps

    @property
    def uniform(self) -> bool:
        """Its steps are over the canvas or of one other kind, whatever the data."""
        others = {step for step, _, _ in self.predicted.steps if not step.whole}
        return len(others) < 2 and not isinstance(self.run.policy, DATA_DEPENDENT)


@dataclasses.dataclass(frozen=True)
class Exact:
    """The exact decoder of the same prompts.

    Attributes:
      mine: its generation.
      once: its time if it is too long for turns, and not too long for anything.
      out: what came out of that run.
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
      limits: an exact generation beyond them is not run.

    Raises:
      MemoryError: it does not fit by prediction, or the device says so.
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
    """The exact decoder, timed once where it takes too long for turns."""
    if not limits.turns_seconds < mine.at_most <= limits.most_seconds:
        return Exact(mine, None)
    out = []
    taken = device.seconds(lambda: out.append(mine.program.run()) or out)
    return Exact(mine, Time.of([taken]), out[0])
