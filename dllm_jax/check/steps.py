"""Single denoising steps, timed as the engine's loop runs them, and whole generations, compiled."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from dllm_jax.check.timing import Time, seconds
from dllm_jax.decoding.placement import Placed, place, traced_for
from dllm_jax.decoding.request import Request
from dllm_jax.engine.generation import Generation, Inputs, Plan, State
from dllm_jax.engine.group import next_variant
from dllm_jax.engine.loop import denoise, step
from dllm_jax.engine.pieces import begin_pieces
from dllm_jax.engine.widths import Variant
from dllm_jax.nn.model import Model

LEADING = 8  # steps within which the first partial one is looked for
ENOUGH = 0.5  # seconds of steps that are timed together
MOST = 4  # number of them


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Times of a full step, and of the first partial one if there is one among the first steps.

    `width` are the positions per sequence of that step, its padding included, `positions` those that it
    computes, a mean over sequences.
    """

    full: Time
    partial: Time | None = None
    width: int | None = None
    positions: float | None = None


def step_times(model: Model, request: Request, repeats: int) -> StepTimes:
    """Times single steps, each from the states it occurs in.

    A step's time is that of a loop with up to `MOST` steps more than another one's: starting a program takes
    milliseconds on GPUs, which steps of a generation do not pay. A policy that reuses has one full step: what
    follows a refresh may be of another kind.
    """
    # Of placement only the phases count: a step is of the whole batch.
    inputs = request.inputs
    plan = dataclasses.replace(request.plan, phases=place(model, request).plan.phases)
    most = min(MOST, plan.layout.steps)
    start = lambda: begin_pieces(model, inputs, plan)
    # `state` is donated, so the cache is changed in place.
    of_variant = lambda variant: lambda state, count=1: _steps(model, inputs, plan, state, count, variant)

    def first_partial() -> tuple[State, Variant]:
        """The state before the first partial step, and its variant; the full step's if there is none."""
        state, full = start(), of_variant(Variant(None))
        for _ in range(min(plan.layout.steps - 1, LEADING)):
            state = full(state)
            if (variant := plan.variants[int(next_variant(plan, state))]).width is not None:
                return state, variant
        return state, Variant(None)

    before, more = (0, 1) if plan.policy.reuses else (1, most)
    full = _timed(of_variant(Variant(None)), start, before, more, repeats)
    state, variant = first_partial() if plan.widths else (None, Variant(None))
    if state is None or variant.width is None:
        return StepTimes(full)
    positions = float(state.need.sum() / state.need.shape[0])
    partial = _timed(of_variant(variant), lambda: first_partial()[0], 1, most, repeats)
    return StepTimes(full, partial, variant.width, positions)


def _timed(
    steps: Callable[..., State], start: Callable[[], State], before: int, most: int, repeats: int
) -> Time:
    """Time of a step. Every run starts again, and making its start is not timed.

    Args:
      steps: Takes a state and the number of steps; runs so many.
      start: Makes the state to start from.
      before: Steps of the shorter run.
      most: Maximum number of steps that the longer run takes besides.
      repeats: Number of runs of each; of the shorter ones the fastest counts.
    """

    def run(count: int) -> float:
        state = jax.block_until_ready(start())
        return seconds(lambda: steps(state, count))

    run(1)  # compiles
    more = max(1, min(most, round(ENOUGH / run(1))))
    shorter = min(run(before) for _ in range(repeats))
    return Time.of([(run(before + more) - shorter) / more for _ in range(repeats)])


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled generation, with the seconds of tracing and lowering, and of XLA or of reading its cache.

    `run` runs it on the model and request it was compiled for: tokens, statistics and None.
    """

    compiled: jax.stages.Compiled
    run: Callable[[], Any]
    lower_s: float
    compile_s: float

    @property
    def bytes(self) -> int | None:
        """Returns the bytes that the compiler reports; None if it reports none."""
        return (m := self.compiled.memory_analysis()) and held_bytes(m)


def held_bytes(m: Any) -> int:
    """Arguments, results and temporaries of a program at once, by its memory analysis; without its code."""
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes


def program(model: Model, request: Request | Placed) -> Program:
    """Compiles a generation ahead of time; an abstract model will do, though its program cannot be run.

    Args:
      model: the model.
      request: Request on the host, or placed with the groups in which `generate` runs its full steps.
    """
    start = time.perf_counter()
    with traced_for(model):
        lowered = denoise.lower(model, request.inputs, request.plan)
    between = time.perf_counter()
    compiled = lowered.compile()
    run = functools.partial(compiled, model, request.inputs, request.plan)
    return Program(compiled, run, between - start, time.perf_counter() - between)


@functools.partial(jax.jit, static_argnames="variant", donate_argnames="state")
def _steps(
    model: Model, inputs: Inputs, plan: Plan, state: State, count: int | jax.Array, variant: Variant
) -> State:
    generation = Generation.of(model, inputs, plan)
    return jax.lax.fori_loop(0, count, lambda _, state: step(generation, variant, state), state)
