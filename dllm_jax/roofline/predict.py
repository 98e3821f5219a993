"""A generation's steps, their cost, its memory, and a lower bound on its time; of many generations too."""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.engine.beginning import empty_cache
from dllm_jax.engine.group import group_size
from dllm_jax.nn.hardware import Hardware
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NonNegativeInt, PositiveInt, check_argument, shown
from dllm_jax.policies import Policy
from dllm_jax.policies.base import for_model
from dllm_jax.roofline.simulation import schedule
from dllm_jax.roofline.steps import Assumed, Cost, Step, cost, layers_size, tower_cost, tower_size
from dllm_jax.state.layout import Layout

USABLE = 0.92  # fraction of the memory; the rest goes to the runtime and to fragmentation


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes that a generation holds at once.

    Attributes:
      weights: all parameters, the tower's included.
      cache: Bytes of the policy's cache (`Policy.init`).
      workspace: an estimate: activations of one layer and statistics of the widest step, the most logits of
        a step, and embeddings of a prompt with images.
      scores: float32 scores of one layer of a full step, of which attention holds a chunk at a time.
    """

    weights: float
    cache: float
    workspace: float
    scores: float

    def total(self, hardware: Hardware) -> float:
        """All of it, with scores and exponentials of as many queries as programs for this hardware take."""
        return self.weights + self.cache + self.workspace + 2 * min(hardware.scores, self.scores)

    def fits(self, hardware: Hardware) -> bool:
        """Whether it takes at most `USABLE` of the capacity."""
        return self.total(hardware) <= USABLE * hardware.capacity


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Lower bounds on the time of a generation, if what was assumed holds.

    `DyLLM` counts as if all rows were salient, `D2Cache` without `Assumed.nucleus` as if influence were
    uniform: their times may be lower.

    Attributes:
      full_ms: milliseconds of the mean full step, which recomputes the canvas.
      partial_ms: the same of the mean partial step, None if there are none.
      seconds: the generation.
      ms_per_token: the same per token of the batch.
      memory_bound: fraction of `seconds` in steps, or the tower's pass, that wait for memory.
      tower_ms: milliseconds of the images' pass through the tower, part of `seconds`.
    """

    full_ms: float
    partial_ms: float | None
    seconds: float
    ms_per_token: float
    memory_bound: float
    tower_ms: float = 0


class StepCount(NamedTuple):
    """A kind of step.

    Attributes:
      step: The kind of step.
      count: Number of such steps; fractional where a part of the steps was assumed.
      cost: Cost of one such step.
    """

    step: Step
    count: float
    cost: Cost


@dataclasses.dataclass(frozen=True)
class Work:
    """A generation of a batch, in steps.

    Attributes:
      steps: each kind once.
      memory: Memory that must fit.
      tokens: response tokens of the batch.
      tower: the images of the batch, before the first step; None if there are none.
    """

    steps: tuple[StepCount, ...]
    memory: MemoryUse
    tokens: int
    tower: Cost | None = None

    def on(self, hardware: Hardware) -> Prediction:
        """Times at the full rates of the hardware."""
        check_argument("hardware", hardware, Hardware, ', such as HARDWARE["h100"]')
        # Time is a sum over kinds of steps, each bound by memory or by compute on its own: a bound of the
        # sums would let the idle bandwidth of one step serve another.
        costs = [(kind.count, kind.cost) for kind in self.steps]
        # The tower runs once, before the loop, and counts in `seconds` but in no step.
        costs += [] if self.tower is None else [(1, self.tower)]
        total = sum(count * cost.seconds(hardware) for count, cost in costs)
        waiting = sum(count * cost.seconds(hardware) for count, cost in costs if cost.memory_bound(hardware))
        images = 0.0 if self.tower is None else self.tower.seconds(hardware)
        full = _mean_ms([kind for kind in self.steps if kind.step.full], hardware)
        partial = _mean_ms([kind for kind in self.steps if not kind.step.full], hardware)
        assert full is not None, "every generation begins with a full step"
        return Prediction(full, partial, total, 1e3 * total / self.tokens, waiting / total, 1e3 * images)


def work(
    spec: ModelSpec,
    policy: Policy,
    layout: Layout,
    batch: int = 1,
    dtype: Any = jnp.bfloat16,
    assumed: Assumed = Assumed(),
    views: int = 0,
) -> Work:
    """Predicts the work of a generation with a fixed schedule.

    Args:
      spec: the model.
      policy: Cache policy. Extra traffic of layers is counted for the library's policies alone.
      layout: the geometry; scheduled for `layout.steps` steps, none left out by end-of-text.
      batch: sequences, all of this layout.
      dtype: Dtype of parameters, activations and storage.
      assumed: Assumptions about data-dependent decisions.
      views: Number of views of each sequence's images (`images`), whose positions are part of
        `layout.prompt`.

    Raises:
      ValueError: an argument of another kind or out of range, or the policy refuses the model or layout;
        views of a model without a tower; blocks that do not divide those of a block-causal model.
    """
    check_argument("spec", spec, ModelSpec, ', such as dj.presets.model_spec("llada-8b")')
    policy = for_model(check_argument("policy", policy, Policy, ", such as dj.policies.DualCache()"), spec)
    check_argument("layout", layout, Layout)
    check_argument("assumed", assumed, Assumed)
    batch = check_argument("batch", batch, PositiveInt)
    views = check_argument("views", views, NonNegativeInt)
    try:
        itemsize = jnp.dtype(dtype).itemsize
    except (TypeError, ValueError, SyntaxError) as error:  # the last of what looks like several dtypes
        raise ValueError(f"dtype={shown(dtype)} is no dtype, such as bfloat16") from error
    # Kinds first, costs per kind: a generation of hundreds of steps has only a handful of different ones.
    counts = schedule(policy, spec, layout, assumed)
    steps = tuple(StepCount(step, count, cost(step, spec, batch, itemsize)) for step, count in counts.items())
    needs = memory(spec, policy, layout, batch, dtype, counts)
    tokens = batch * (layout.response - layout.tail)
    if not views:
        return Work(steps, needs, tokens)
    embeds = itemsize * batch * layout.prompt * spec.width  # an argument of the whole program
    needs = dataclasses.replace(needs, workspace=needs.workspace + embeds)
    return Work(steps, needs, tokens, tower_cost(spec, batch * views, itemsize))


def memory(
    spec: ModelSpec, policy: Policy, layout: Layout, batch: int, dtype: Any, steps: dict[Step, float]
) -> MemoryUse:
    """Predicts the memory of a generation; arguments as in `work`."""
    itemsize = jnp.dtype(dtype).itemsize
    tables = spec.vocab * spec.width * (1 if spec.tied else 2) + spec.width
    count = spec.experts.count if spec.experts else 0
    layers: Any = [] if spec.layers_differ else {}
    described = Model({"embed": jax.ShapeDtypeStruct((), dtype), "layers": layers}, spec)
    stored = lambda: empty_cache(described, policy, layout, batch)
    cache = jax.tree.leaves(jax.eval_shape(stored))

    # Activations of one layer: the stream twice, queries, keys, values and output, the MLP's two branches; of
    # every expert that a position is sent to its input, both branches and its output.
    heads, inner = 2 * spec.heads + 2 * spec.kv_heads, 2 * spec.mlp_width
    if (experts := spec.experts) is not None:
        inner = max(inner, 2 * experts.shared + 2 * experts.per_token * (spec.width + experts.mlp_width))
    per_position = itemsize * (2 * spec.width + heads * spec.head_dim + inner)
    # Kinds differ in what is large: a full step has the most rows, a step of d2Cache the most logits.
    logits = max(step.candidates for step in steps) * spec.vocab * 4
    widest = max(step.rows * per_position + step.scratch for step in steps)
    return MemoryUse(
        weights=itemsize * (layers_size(spec, count) + tables + tower_size(spec)),
        cache=sum(a.size * a.dtype.itemsize for a in cache),
        workspace=batch * (widest + logits),
        scores=4 * batch * spec.heads * layout.length**2,
    )


def _mean_ms(kinds: list[StepCount], hardware: Hardware) -> float | None:
    """Milliseconds of the average step of these kinds, None if there is none."""
    count = sum(kind.count for kind in kinds)
    total = sum(kind.count * kind.cost.seconds(hardware) for kind in kinds)
    return 1e3 * total / count if count else None


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
      policy: Cache policy; each block is assumed to begin with a full step.
      layout: Layout of every request.
      requests: denoising steps of each block of each request, in order of arrival.
      slots: sequences in flight, or of a batch.
      hardware: Hardware whose rates count.

    Raises:
      ValueError: those of `work`; no slots, no requests, or one without blocks or with a block of no step.
    """
    slots = check_argument("slots", slots, PositiveInt)
    if not requests or not all(
        np.ndim(blocks) == 1 and len(blocks) and min(blocks) > 0 for blocks in requests
    ):
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
    coming, in_slots, time = iter(requests), [], 0.0
    while True:
        # A request is its blocks' steps, of which the first of a block is a full one.
        while len(in_slots) < slots and (blocks := next(coming, None)) is not None:
            in_slots.append([step == 0 for steps in blocks for step in range(steps)][::-1])
        if not in_slots:
            return time
        # Those that have come least far go first: they have most left.
        due = [i for i, left in enumerate(in_slots) if partial is None or left[-1]]
        ran = heapq.nlargest(group, due, key=lambda i: len(in_slots[i])) if due else range(len(in_slots))
        time += full if due or partial is None else partial
        for i in ran:
            in_slots[i].pop()
        in_slots = [left for left in in_slots if left]


def _in_batches(requests, slots: int, full: float, partial: float) -> float:
    """Milliseconds until all have ended, a batch after the other."""
    time = 0.0
    for start in range(0, len(requests), slots):
        batch = requests[start : start + slots]
        for block in range(max(map(len, batch))):
            longest = max(blocks[block] for blocks in batch if block < len(blocks))
            time += full + (longest - 1) * partial
    return time
