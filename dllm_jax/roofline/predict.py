"""A generation's steps, what they cost, what has to fit into memory, and how long it takes at least."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.layout import Layout
from dllm_jax.policies import Policy
from dllm_jax.query_chunks import SCORE_BYTES
from dllm_jax.roofline.hardware import Hardware
from dllm_jax.roofline.schedule import schedule
from dllm_jax.roofline.setting import Assumed
from dllm_jax.roofline.steps import Cost, Number, Step, cost, layer_size
from dllm_jax.spec import ModelSpec

USABLE = 0.92  # of the memory: the rest is the runtime's, and lost between allocations


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes that a generation holds at once.

    Attributes:
      weights: all parameters.
      cache: what the policy stores, exactly (`Policy.init`).
      workspace: activations of one layer of the widest step, a chunk of scores, logits: an estimate.
    """

    weights: Number
    cache: Number
    workspace: Number

    @property
    def total(self) -> Number:
        """All of it."""
        return self.weights + self.cache + self.workspace

    def fits(self, hardware: Hardware) -> bool:
        """It takes at most `USABLE` of the capacity."""
        return self.total <= USABLE * hardware.capacity


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The least a generation takes.

    Attributes:
      whole_ms: a step that recomputes the canvas.
      part_ms: the mean of all other steps, None if there are none.
      seconds: the generation.
      ms_per_token: the same per token of the batch.
      memory_bound: share of the time spent in steps that wait for memory.
    """

    whole_ms: float
    part_ms: float | None
    seconds: float
    ms_per_token: float
    memory_bound: float


@dataclasses.dataclass(frozen=True)
class Work:
    """A generation of a batch, in steps.

    Attributes:
      steps: each kind with how many there are and what one costs.
      memory: what has to fit.
      tokens: response tokens of the batch.
    """

    steps: tuple[tuple[Step, Number, Cost], ...]
    memory: MemoryUse
    tokens: int

    def on(self, hardware: Hardware) -> Prediction:
        """Times at the full rates of the hardware."""
        timed = [(step, count, price.seconds(hardware)) for step, count, price in self.steps]
        total = sum(count * seconds for _, count, seconds in timed)
        waiting = sum(count * p.seconds(hardware) for _, count, p in self.steps if p.memory_bound(hardware))
        whole, part = (_mean([t for t in timed if t[0].whole is kind]) for kind in (True, False))
        assert whole is not None, "every generation begins with a whole step"
        return Prediction(whole, part, total, 1e3 * total / self.tokens, waiting / total)


def work(
    spec: ModelSpec,
    policy: Policy,
    layout: Layout,
    batch: int = 1,
    dtype: Any = jnp.bfloat16,
    assumed: Assumed = Assumed(),  # noqa: B008 (frozen)
) -> Work:
    """What a generation with a fixed schedule has to do.

    Args:
      spec: the model.
      policy: one of `dllm_jax.policies`.
      layout: the geometry; `layout.steps` denoising steps, none left out by end-of-text.
      batch: sequences, all of this layout.
      dtype: of parameters, activations and storage.
      assumed: what the data decides.

    Raises:
      NotImplementedError: for a policy without a schedule.
      ValueError: batch is not positive, or the policy refuses the model or layout.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    itemsize = jnp.dtype(dtype).itemsize
    counts = schedule(policy, spec, layout, assumed)
    steps = tuple((step, count, cost(step, spec, batch, itemsize)) for step, count in counts.items())
    return Work(steps, memory(spec, policy, layout, batch, dtype, counts), batch * layout.response)


def memory(
    spec: ModelSpec, policy: Policy, layout: Layout, batch: int, dtype: Any, steps: dict[Step, Number]
) -> MemoryUse:
    """What a generation holds at once; arguments as in `work`."""
    itemsize = jnp.dtype(dtype).itemsize
    tables = spec.vocab * spec.width * (1 if spec.tied else 2) + spec.width
    cache = jax.tree.leaves(jax.eval_shape(lambda: policy.init(spec, layout, batch, dtype)))
    heads = 2 * spec.heads + 2 * spec.kv_heads
    row = itemsize * (2 * spec.width + heads * spec.head + 2 * spec.hidden)
    logits = max(step.candidates for step in steps) * spec.vocab * 4
    scores = min(SCORE_BYTES, 4 * batch * spec.heads * layout.length**2)
    widest = max(step.rows * row + step.scratch for step in steps)
    return MemoryUse(
        weights=itemsize * (spec.layers * layer_size(spec) + tables),
        cache=sum(a.size * a.dtype.itemsize for a in cache),
        workspace=batch * (widest + logits) + 2 * scores,
    )


def _mean(timed: list[tuple[Step, Number, float]]) -> float | None:
    """Milliseconds of a step, weighted by how many there are."""
    count = sum(count for _, count, _ in timed)
    return 1e3 * sum(count * seconds for _, count, seconds in timed) / count if count else None
