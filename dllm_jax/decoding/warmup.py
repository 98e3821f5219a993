"""Compiles ahead of time what a ladder of prompt lengths will need."""

import time
from typing import NamedTuple, Unpack

import numpy as np

from dllm_jax.decoding.buckets import DEFAULT, Ladder, check_ladder
from dllm_jax.decoding.compare import compiled, temporary_bytes
from dllm_jax.decoding.options import GenerateOptions, check_options, options_of, shows
from dllm_jax.decoding.request import prepare
from dllm_jax.decoding.slots import Slots
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.options.hints import tell


class Compiled(NamedTuple):
    """One program that is ready.

    Attributes:
      prompt: prompt positions, a rung of the ladder.
      batch: sequences, or slots.
      seconds: wall time of tracing and compiling it, maybe along with others; near 0 if this process had it.
      temporary: bytes the program needs besides arguments and results, as the compiler reports them; -1 if it
        does not.
    """

    prompt: int
    batch: int
    seconds: float
    temporary: int


@shows(options_of("warmup") - {"buckets"})
def warmup(
    model: Model,
    ladder: Ladder = DEFAULT,
    *,
    batch: int = 1,
    slots: int | None = None,
    **options: Unpack[GenerateOptions],
) -> list[Compiled]:
    """Compiles the programs of `generate(.., buckets=ladder)` for every bucket length; runs no step.

        dj.warmup(model, dj.buckets.geometric(64, 1024), length=128, block=32, policy=dj.policies.DualCache())

    Later calls of `generate` with the same options and batch size start at once; with `slots`, those of
    `generate_many` with as many slots.

    Args:
      model: Model to use later; its shapes, dtype and sharding count.
      ladder: Bucket lengths to compile for.
      batch: Number of sequences per request.
      slots: Number of slots of `generate_many`, whose programs are compiled instead.
      **options: Arguments of `generate`, except for prompts, `prefix`, `progress` and `buckets`; a `key` is
        needed if the sampler draws.

    Raises:
      ValueError: Invalid arguments (`generate`), bucket lengths or batch size.
      TypeError: An option that `warmup` does not have.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_ladder("ladder", ladder)
    batch = check_argument("batch", batch, PositiveInt)
    if "buckets" in options:
        raise ValueError("buckets= is the second argument of warmup: warmup(model, ladder, ...)")
    check_options("warmup", options, "batch", "slots")
    if slots is None:
        # Programs depend on the prompt's shape alone, so that any ids will do.
        prompt = lambda rung: np.full((batch, rung), model.spec.eos_id, np.int32)
        runs = compiled(model, [(prompt(n), {**options, "buckets": Ladder((n,))}) for n in ladder.rungs])
        return [
            Compiled(n, batch, run.seconds, run.memory) for n, run in zip(ladder.rungs, runs, strict=True)
        ]
    count = check_argument("slots", slots, PositiveInt)
    told = set[type[Warning]]()
    return [_compile_slots(model, rung, count, {**options}, told) for rung in ladder.rungs]


def _compile_slots(model: Model, rung: int, count: int, options: dict, told: set) -> Compiled:
    start = time.perf_counter()
    request = prepare(model, [[model.spec.eos_id]], buckets=Ladder((rung,)), **options)
    tell(request.notices, told)
    nothing = request.inputs._replace(valid=np.zeros_like(request.inputs.valid))
    slots = Slots(model, request, count)
    slots.enter(0, request._replace(inputs=nothing))
    slots.run()
    slots.ended()
    return Compiled(rung, count, time.perf_counter() - start, temporary_bytes(slots.program()))
