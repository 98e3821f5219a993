"""Compiles ahead of time what a ladder of prompt lengths will need."""

import dataclasses
import inspect
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dllm_jax.decoding.buckets import DEFAULT, Ladder, check_ladder
from dllm_jax.decoding.loop import denoise
from dllm_jax.decoding.plan import Plan
from dllm_jax.decoding.request import Inputs, over_devices, prepare
from dllm_jax.nn.mesh import current_mesh
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.state import host

OF_REQUESTS = {"model", "prompt", "prompt_mask", "prompt_embeds", "buckets"}
OPTIONS = inspect.signature(prepare).parameters.keys() - OF_REQUESTS


class Compiled(NamedTuple):
    """One program that is ready.

    Attributes:
      prompt: prompt positions, a rung of the ladder.
      batch: sequences.
      seconds: wall time of tracing and compiling it; near 0 if it was ready before.
      temporary: bytes the program needs besides arguments and results, as the compiler reports them.
    """

    prompt: int
    batch: int
    seconds: float
    temporary: int


def warmup(model: Model, ladder: Ladder = DEFAULT, *, batch: int = 1, **options) -> list[Compiled]:
    """Compiles `generate(model, prompt, buckets=ladder, **options)` for every rung, without running anything.

        dj.warmup(model, dj.buckets.geometric(64, 1024), length=128, block=32, policy=dj.policies.DualCache())

    Later calls of `generate` with the same options and batch size start at once.

    Args:
      model: the model that will be used; its shapes, dtype and sharding count.
      ladder: the rungs to compile for.
      batch: sequences per request.
      **options: of `generate`, but for prompts and `buckets`; a `key` is needed if the sampler draws.

    Raises:
      ValueError: as `generate`; no ladder, no such batch, or an option that `generate` does not have.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    check_ladder("ladder", ladder)
    batch = check_argument("batch", batch, PositiveInt)
    if "buckets" in options:
        raise ValueError("buckets= is the second argument of warmup: warmup(model, ladder, ...)")
    if unknown := sorted(options.keys() - OPTIONS):
        raise ValueError(f"{', '.join(unknown)}: warmup takes {', '.join(sorted(OPTIONS))}")
    return [_compile(model, rung, batch, options) for rung in ladder.rungs]


def _compile(model: Model, rung: int, batch: int, options: dict) -> Compiled:
    prompt = np.full((batch, rung), model.spec.eos_id, np.int32)
    start = time.perf_counter()
    model = dataclasses.replace(model, vision=None)  # as `generate` does
    request = prepare(model, prompt, buckets=Ladder((rung,)), **options)
    inputs, plan = _placed(model, request.inputs, request.plan)
    program = denoise.lower(model, *inputs, layout=request.layout, plan=plan).compile()
    memory = program.memory_analysis()
    temporary = memory.temp_size_in_bytes if memory is not None else -1
    return Compiled(rung, batch, time.perf_counter() - start, temporary)


def _placed(model: Model, inputs: Inputs, plan: Plan) -> tuple[Inputs, Plan]:
    """The arrays where `generate` puts them; described like the model if that is only described."""
    mesh = current_mesh(model.params)
    if mesh is None or isinstance(model.params["embed"], jax.Array):
        return over_devices(inputs, model, mesh).inputs, host.numbers(plan, mesh)
    inputs = over_devices(inputs, model, mesh.abstract_mesh).inputs
    where = NamedSharding(mesh, PartitionSpec(model.rules.axes(mesh, "b") or None))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), inputs), plan
