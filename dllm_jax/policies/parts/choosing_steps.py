"""Steps of a model's block that read everything, and the one that chooses what the others read."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.proposal import Proposal
from dllm_jax.state.rows import Rows
from dllm_jax.traced import Count


class Reading(NamedTuple):
    """State that layers and steps share.

    Attributes:
      read: Positions of earlier blocks that some head of some layer has chosen.
      steps: Steps since the model's block was entered.
    """

    read: Bool[Array, "b l"]
    steps: Int[Array, "b"]

    @staticmethod
    def nothing(batch: int, length: int) -> "Reading":
        """The state before the first step."""
        return Reading(jnp.zeros((batch, length), bool), jnp.zeros((batch,), jnp.int32))


@dataclasses.dataclass(frozen=True)
class ChoosingSteps(Policy):
    """Base of policies that compute all of a block in each step, and read everything in its first steps."""

    @property
    def waits(self) -> Count:
        """Exact steps of a block before the one that chooses."""
        return 0

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """None but those of every block-causal model: a block, and two of them."""
        return ()

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything that is not final: the model's block."""
        return canvas.everything

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in exact steps, then the block and what any head of any layer has chosen."""
        own = canvas.in_model_block | cache.shared.read
        return jnp.where(self.exact(cache.shared, canvas), canvas.valid, own)

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        read = cache.shared.read & ~self.chooses(cache.shared, canvas)
        return cache._replace(shared=cache.shared._replace(read=read))

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        steps = jnp.where(canvas.active, _steps(cache.shared, canvas)[:, 0] + 1, cache.shared.steps)
        return cache._replace(shared=cache.shared._replace(steps=steps))

    def exact(self, reading: Reading, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether the coming step of a sequence reads everything."""
        return _steps(reading, canvas) <= self.waits

    def chooses(self, reading: Reading, canvas: Canvas) -> Bool[Array, "b 1"]:
        """Whether the coming step chooses: one after a first token that another block predicts, if any."""
        chooses = _steps(reading, canvas) == self.waits
        return chooses & ~canvas.opens_model_block & canvas.active[:, None]


def _steps(reading: Reading, canvas: Canvas) -> Int[Array, "b 1"]:
    """Steps of the model's block before the coming one; an opening one does not count."""
    return jnp.where(canvas.enters_model_block, 0, reading.steps[:, None])
