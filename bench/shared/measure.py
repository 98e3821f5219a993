"""One generation to measure: its request, and its program compiled ahead of time."""

import dataclasses
import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from dllm_jax.decoding.loop import denoise
from dllm_jax.decoding.request import Request, prepare
from dllm_jax.samplers import Sampler
from dllm_jax.samplers.parallel import UntilDone


@dataclasses.dataclass(frozen=True)
class Run:
    """What is generated.

    Attributes:
      prompt: positions; the ids are random.
      batch: sequences.
      length: response positions.
      block: positions per block.
      steps: denoising steps of fixed schedules.
      policy: what is recomputed.
      sampler: what is decoded; `RandomOrder` instead where the policy needs to know the order.
    """

    prompt: int
    batch: int
    length: int
    block: int
    steps: int
    policy: dj.policies.Policy
    sampler: Sampler

    @property
    def chosen(self) -> Sampler:
        """The sampler that decodes."""
        return dj.samplers.RandomOrder() if isinstance(self.policy, dj.policies.DKVGreedy) else self.sampler

    @property
    def fixed_steps(self) -> bool:
        """The number of steps is known beforehand: every step decodes the same number of tokens."""
        return not isinstance(self.chosen, UntilDone)

    def request(self, model: dj.Model) -> Request:
        """The request as `dj.generate` prepares it; of the model only shapes and dtypes count."""
        sampler = self.chosen
        lowest = min(model.spec.mask_id, model.spec.eos_id, model.spec.vocab)
        tokens = np.random.default_rng(0).integers(0, lowest, (self.batch, self.prompt))
        return prepare(
            model,
            tokens,
            length=self.length,
            block=self.block,
            steps=self.steps,
            policy=self.policy,
            sampler=sampler,
            key=jax.random.key(0) if sampler.draws else None,
        )


@dataclasses.dataclass(frozen=True)
class Spent:
    """Time that something took.

    Attributes:
      wall_s: seconds.
      cpu_s: seconds of this process on all cores, which leaves out what other processes take.
    """

    wall_s: float
    cpu_s: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled generation.

    Attributes:
      compiled: the executable.
      run: runs it on the model and request it was compiled for; tokens, statistics and None.
      lower: tracing and lowering.
      compile: XLA, or reading its cache if one is set up.
    """

    compiled: jax.stages.Compiled
    run: Callable[[], Any]
    lower: Spent
    compile: Spent

    @property
    def bytes(self) -> int | None:
        """Arguments, results and temporaries at once, by the compiler's account; None if it has none."""
        m = self.compiled.memory_analysis()
        if m is None:
            return None
        held = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
        return held - m.alias_size_in_bytes


def program(model: dj.Model, request: Request) -> Program:
    """Compiles a generation ahead of time; an abstract model will do, though its program cannot be run."""
    lowered, lower = _spending(
        lambda: denoise.lower(model, *request.inputs, layout=request.layout, plan=request.plan)
    )
    compiled, compile = _spending(lowered.compile)
    return Program(compiled, functools.partial(compiled, model, *request.inputs), lower, compile)


def _spending(work: Callable[[], Any]) -> tuple[Any, Spent]:
    wall, cpu = time.perf_counter(), _cpu()
    done = work()
    return done, Spent(time.perf_counter() - wall, _cpu() - cpu)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
