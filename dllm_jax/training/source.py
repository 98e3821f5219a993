"""Sources of batches: pure functions of the step and a small memory, which is checkpointed."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from dllm_jax.nn.model import Model
from dllm_jax.training.batch import Batch

Memory = dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """A stream of batches.

    A source keeps all its state in its memory, a JSON-serialisable dict, so a resumed run sees the batches it
    would have seen without the interruption.
    """

    def begin(self) -> Memory:
        """The memory before the first step."""
        ...

    def batch(self, memory: Memory, step: int) -> Batch:
        """The batch of a step; the same arguments give the same batch."""
        ...

    def review(self, memory: Memory, model: Model, step: int) -> Memory:
        """The memory after evaluating the model, every `TrainConfig.review_every` steps."""
        ...


@dataclasses.dataclass(frozen=True)
class Batches(Source):
    """A source without memory: a function of the step.

    Attributes:
      at: gives the batch of a step, e.g. `lambda step: batches[step % len(batches)]`.
    """

    at: Callable[[int], Batch]

    @override
    def begin(self) -> Memory:
        return {}

    @override
    def batch(self, memory: Memory, step: int) -> Batch:
        return self.at(step)

    @override
    def review(self, memory: Memory, model: Model, step: int) -> Memory:
        return memory
