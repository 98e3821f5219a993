"""One generation, measured: compilation, steps of each kind, the whole run, memory."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import dllm_jax as dj
from bench.device import Time, seconds
from dllm_jax.arithmetic import rope_table
from dllm_jax.engine import denoise
from dllm_jax.request import Request, prepare
from dllm_jax.samplers import Sampler
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.step import State, initial, step


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
        return dj.samplers.RandomOrder() if self.policy.foresees else self.sampler

    @property
    def fixed_steps(self) -> bool:
        """The number of steps is known beforehand: the sampler decodes as many tokens in each."""
        return not isinstance(self.chosen, UntilDone)

    def request(self, model: dj.Model) -> Request:
        """As `dj.generate` prepares it."""
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
class Program:
    """A compiled generation.

    Attributes:
      run: runs it; tokens, statistics and None.
      lower_s: seconds of tracing and lowering.
      compile_s: seconds of XLA (or of reading its cache, if one is set up).
      bytes: arguments, results and temporaries at once, by the compiler's account; None if it has none.
    """

    run: Callable[[], Any]
    lower_s: float
    compile_s: float
    bytes: int | None


def program(model: dj.Model, request: Request) -> Program:
    """Compiles a generation ahead of time."""
    begin = time.perf_counter()
    lowered = denoise.lower(model, *request.arrays, layout=request.layout, plan=request.plan)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    m = compiled.memory_analysis()
    total = None
    if m is not None:
        total = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
        total -= m.alias_size_in_bytes
    run = functools.partial(compiled, model, *request.arrays)
    return Program(run, middle - begin, end - middle, total)


@dataclasses.dataclass(frozen=True)
class Kinds:
    """Times of a step by its kind.

    Attributes:
      whole: recomputes the canvas.
      part: the first step of another kind, None if there is none in the first steps.
      width: rows of that step, its padding included.
    """

    whole: Time
    part: Time | None
    width: int | None


def kinds(model: dj.Model, request: Request, repeats: int, most: int = 4) -> Kinds:
    """Times single steps as the loop runs them, from the states they occur in.

    The state is donated from step to step, so the cache is changed in place. Up to `most` steps are queued
    and share one waiting, but of steps over the canvas only where all are: what follows a refresh may be of
    another kind. Each group starts anew, and what leads up to it is not timed.
    """
    layout, plan = request.layout, request.plan
    noise = request.arrays[2]

    @jax.jit
    def begin(model, arrays) -> State:
        tokens, valid, noise = arrays
        return initial(model, tokens, valid, noise, layout, plan)

    @functools.partial(jax.jit, static_argnames="width", donate_argnames="state")
    def onwards(model, noise, state, width):
        rope = rope_table(layout.length, model.spec.head, model.spec.rope_base)
        return step(model, rope, noise, plan, width, state)

    def fresh() -> State:
        return begin(model, request.arrays)

    def until_part() -> tuple[State, int | None]:
        state = fresh()
        for _ in range(min(layout.steps - 1, 8)):
            state = onwards(model, noise, state, None)
            if width := _next_width(state, plan.widths):
                return state, width
        return state, None

    def group(start: Callable[[], State], width: int | None, most: int) -> Time:
        state = jax.block_until_ready(onwards(model, noise, start(), width))  # compiles
        once = seconds(lambda: onwards(model, noise, start(), width))
        calls = max(1, min(most, layout.steps, round(0.5 / once)))
        taken = []
        for _ in range(repeats):
            state = jax.block_until_ready(start())
            begun = time.perf_counter()
            for _ in range(calls):
                state = onwards(model, noise, state, width)
            jax.block_until_ready(state)
            taken.append((time.perf_counter() - begun) / calls)
        return Time.of(taken)

    whole = group(fresh, None, 1 if plan.policy.reuses else most)
    width = until_part()[1] if plan.widths else None
    part = None if width is None else group(lambda: until_part()[0], width, most)
    return Kinds(whole, part, width)


def _next_width(state: State, widths: tuple[int, ...]) -> int | None:
    """Static width that the coming step takes, None for the whole canvas."""
    need = np.asarray(state.need)
    if need.all():
        return None
    widest = need.sum(axis=1).max()
    return min((width for width in widths if width >= widest), default=None)
