"""Sequences per second with requests in flight, and of batches that wait for their slowest: a simulation."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from dllm_jax.engine.group import group_size
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, check_argument, shown
from dllm_jax.policies import Policy
from dllm_jax.roofline.hardware import Hardware
from dllm_jax.roofline.predict import work
from dllm_jax.state.layout import Layout


class Throughput(NamedTuple):
    """Sequences per second, upper bounds at the full rates of the hardware.

    Attributes:
      in_flight: Sequences per second of `generate_many` (continuous batching).
      in_batches: Sequences per second of fixed batches in order of arrival, which wait for their slowest
        sequence.
    """

    in_flight: float
    in_batches: float


def throughput(
    spec: ModelSpec,
    policy: Policy,
    layout: Layout,
    requests: Sequence[Sequence[int]],
    slots: int,
    hardware: Hardware,
) -> Throughput:
    """How many sequences end per second, in bfloat16.

    Args:
      spec: the model.
      policy: Cache policy; a block begins with a full step.
      layout: Layout of every request.
      requests: denoising steps of each block of each request, in order of arrival.
      slots: sequences in flight, or of a batch.
      hardware: Hardware whose rates count.

    Raises:
      ValueError: no slots, no requests, or one without blocks or with a block of no step.
    """
    slots = check_argument("slots", slots, PositiveInt)
    if not requests or not all(len(blocks) and min(blocks) > 0 for blocks in requests):
        raise ValueError(f"requests={shown(requests)} must be blocks of steps, such as [[4, 2], [3]]")
    seconds = lambda batch: work(spec, policy, layout, batch).on(hardware)
    group = min(slots, group_size(policy, spec, layout, "tpu"))
    whole, count = seconds(slots), 1e3 * len(requests)
    return Throughput(
        count / _in_flight(requests, slots, group, seconds(group).full_ms, whole.partial_ms),
        count / _in_batches(requests, slots, whole.full_ms, whole.partial_ms or whole.full_ms),
    )


def _in_flight(requests, slots: int, group: int, full: float, partial: float | None) -> float:
    """Milliseconds until all have ended; without partial steps every step is a full one of a group."""
    coming, held, time = iter(requests), [], 0.0
    while True:
        # A request is its blocks' steps, of which the first of a block is a full one.
        while len(held) < slots and (blocks := next(coming, None)) is not None:
            held.append([step == 0 for steps in blocks for step in range(steps)][::-1])
        if not held:
            return time
        # Those that have come least far go first: they have most left.
        due = [i for i, left in enumerate(held) if partial is None or left[-1]]
        ran = heapq.nlargest(group, due, key=lambda i: len(held[i])) if due else range(len(held))
        time += full if due or partial is None else partial
        for i in ran:
            held[i].pop()
        held = [left for left in held if left]


def _in_batches(requests, slots: int, full: float, partial: float) -> float:
    """Milliseconds until all have ended, a batch after the other."""
    time = 0.0
    for start in range(0, len(requests), slots):
        batch = requests[start : start + slots]
        for block in range(max(map(len, batch))):
            longest = max(blocks[block] for blocks in batch if block < len(blocks))
            time += full + (longest - 1) * partial
    return time
