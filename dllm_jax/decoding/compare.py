"""`compare`: the same prompts under several policies and samplers, and what each costs."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from dllm_jax.decoding.options import GenerateOptions, check_options, options_of, shows
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.placement import Placed, collect, place, traced_for
from dllm_jax.decoding.report import report
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.loop import denoise
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, call, check_argument, shown
from dllm_jax.options.hints import tell
from dllm_jax.policies.base import Policy
from dllm_jax.state import host, inputs

COLUMNS = {  # title, and what a row and its MiB of memory have there
    "policy": "{0.name}", "equal": "{0.equal:.0%}", "nfe": "{0.nfe:.1f}", "computed": "{0.computed:.0f}",
    "seconds": "{0.seconds:.3f}", "speed-up": "{0.speed_up:.2f}", "compile s": "{0.compile_seconds:.1f}",
    "memory MiB": "{1:.1f}",
}  # fmt: skip


class Compared(NamedTuple):
    """One row of a comparison; of a batch, means over its sequences.

    Attributes:
      name: Name of the policy, or the caller's name.
      equal: fraction of sequences whose response is that of the first row, token for token.
      nfe: Forward passes.
      computed: positions fed through the network, summed over forward passes.
      seconds: median wall time of the whole batch, compilation excluded.
      speed_up: Speed relative to the first row.
      compile_seconds: wall time of tracing and compiling, along with the other programs except on GPUs. A
        program that was cached on disk is traced all the same.
      memory: bytes that the program needs besides arguments and results, as the compiler reports them; -1 if
        it does not.
      output: Output of `generate`.
    """

    name: str
    equal: float
    nfe: float
    computed: float
    seconds: float
    speed_up: float
    compile_seconds: float
    memory: int
    output: Output


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A table; `print` it.

    Attributes:
      rows: one for each policy, in the order given.
    """

    rows: tuple[Compared, ...]

    def __str__(self) -> str:
        cells = [
            [written.format(row, row.memory / 2**20) for written in COLUMNS.values()] for row in self.rows
        ]
        return text_table([[*COLUMNS], *cells])


@shows(options_of("compare"))
def compare(
    model: Model,
    prompt: inputs.Ids,
    policies: Sequence[Policy | Mapping[str, Any]] | Mapping[str, Policy | Mapping[str, Any]],
    *,
    repeats: int = 3,
    **options: Unpack[GenerateOptions],
) -> Comparison:
    """Answers the same prompts under several policies, and compares their cost with the first.

        print(dj.compare(model, prompts, [Policy(), DualCache(), DKVDecode()], length=64, block=32))

    Every program is compiled first. Then the runs are interleaved, `repeats` times.

    Args:
      model: Model returned by `load`.
      prompt: Prompt of `generate`.
      policies: Policies, or dicts of the options of `generate` in which they differ, such as {"policy":
        DualCache(), "sampler": Threshold(0.9)} or a preset's `options()`; a list, or a dict by name.
      repeats: Number of timed runs of each policy.
      **options: Arguments of `generate`, except for `progress`, for all policies.

    Returns:
      A table with a row per policy.

    Raises:
      ValueError: Invalid arguments (`generate`), or no policies.
      TypeError: An option that `compare` does not have.
      FloatingPointError: Logits held NaN or infinity, with nonfinite="raise".

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> policies = [dj.policies.Policy(), dj.policies.DualCache()]
      >>> found = dj.compare(model, [[40, 41, 42]], policies, repeats=1, length=8, block=4)
      >>> [row.name for row in found.rows], found.rows[0].equal
      (['Policy()', 'DualCache()'], 1.0)
    """
    repeats = check_argument("repeats", repeats, PositiveInt)
    check_options("compare", options, "repeats")
    named = _named(policies, options)
    runs = compiled(model, [(prompt, asked) for _, asked in named])
    first = [_timed(run) for run in runs]  # not counted: a program's first run may load it

    # In turns, so that what slows the machine for a while slows all of them; the median leaves out the rest.
    turns = [[_timed(run)[0] for run in runs] for _ in range(repeats)]
    seconds = np.median(turns, axis=0)
    outputs = [output for _, output in first]
    for run, output in zip(runs, outputs, strict=True):
        plan = run.placed.plan
        report(output.stats, plan.policy, plan.sampler, run.placed.nonfinite)
    mean = lambda array: float(np.mean(host.everywhere(array)))
    responses = [
        host.everywhere(output.tokens)[:, run.placed.plan.layout.prompt - run.placed.extra :]
        for run, output in zip(runs, outputs, strict=True)
    ]
    # Sequences with the response of the first row, none where lengths differ.
    alike = lambda ours: np.all(ours == responses[0], axis=1) if ours.shape == responses[0].shape else 0.0
    return Comparison(
        tuple(
            Compared(
                name=name,
                equal=float(np.mean(alike(response))),
                nfe=mean(output.stats.nfe),
                computed=mean(output.stats.computed_tokens),
                seconds=float(spent),
                speed_up=float(seconds[0] / spent),
                compile_seconds=run.seconds,
                memory=run.memory,
                output=output,
            )
            for (name, _), run, output, response, spent in zip(
                named, runs, outputs, responses, seconds, strict=True
            )
        )
    )


class CompiledRun(NamedTuple):
    """A program that is ready, and what it takes."""

    placed: Placed
    program: jax.stages.Compiled
    seconds: float  # that it took to compile
    memory: int  # bytes


def _named(policies: Any, options: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The options of each run, by name."""
    # A policy is short for the one option that it is; a run in a list is called by what it sets.
    listed = isinstance(policies, Sequence) and not isinstance(policies, str)
    named = list(policies.items()) if isinstance(policies, Mapping) else []
    named = [(None, policy) for policy in policies] if listed else named
    if not named:
        raise ValueError(f"policies={shown(policies)} must be policies, such as [Policy(), DualCache()]")
    both = [(name, dict(run) if isinstance(run, Mapping) else {"policy": run}) for name, run in named]
    for _, run in both:
        check_options("compare", run)
    title = lambda name, asked: ", ".join(map(call, asked.values())) if name is None else str(name)
    return [(title(name, run), {**options, **run}) for name, run in both]


def compiled(model: Model, asked: Sequence[tuple[Any, dict[str, Any]]]) -> list[CompiledRun]:
    """Compiles generations for the shapes of a prompt and options each, all at once except on GPUs.

    There XLA times kernels while it compiles, which other programs would disturb.
    """

    told = set[type[Warning]]()

    def lowered(prompt: Any, options: dict[str, Any]) -> tuple[Placed, jax.stages.Lowered, float]:
        request = prepare(model, prompt, **options)
        tell(request.notices, told)
        placed = place(model, request, prompt)
        start = time.perf_counter()
        with traced_for(placed.model):
            program = denoise.lower(placed.model, placed.inputs, placed.plan)
        return placed, program, time.perf_counter() - start

    def run(placed: Placed, program: jax.stages.Lowered, seconds: float) -> CompiledRun:
        start = time.perf_counter()
        made = program.compile()
        return CompiledRun(placed, made, seconds + time.perf_counter() - start, temporary_bytes(made))

    # The first is compiled while the second is traced, which stays in this thread for its configuration.
    with ThreadPoolExecutor(1 if jax.default_backend() == "gpu" else None) as pool:
        runs = [pool.submit(run, *lowered(*request)) for request in asked]
        return [run.result() for run in runs]


def temporary_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a program needs besides arguments and results; -1 if the compiler does not say."""
    account = program.memory_analysis()
    return -1 if account is None else account.temp_size_in_bytes


def _timed(run: CompiledRun) -> tuple[float, Output]:
    """Seconds until the results of a run are there, and its output."""
    start = time.perf_counter()
    results = jax.block_until_ready(run.program(run.placed.model, run.placed.inputs, run.placed.plan))
    return time.perf_counter() - start, collect(run.placed, *results)


def text_table(rows: Sequence[Sequence[Any]]) -> str:
    """Rows of cells as lines of text, their columns below each other."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join(lines)
