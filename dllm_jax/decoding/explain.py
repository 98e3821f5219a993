"""Which implementation each operation takes in a generation, and why; `pallas_kernels.choice` decides."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.decoding.step import computed_rows, empty_cache, network
from dllm_jax.decoding.widths import step_widths
from dllm_jax.nn.arithmetic import rope_table
from dllm_jax.nn.attention import Mask
from dllm_jax.nn.kernels import SEAMS
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.model import Model
from dllm_jax.policies.base import Policy
from dllm_jax.state.canvas import begin
from dllm_jax.state.layout import Layout
from pallas_kernels import OPERATIONS, Operation
from pallas_kernels.attention import ATTENTION, HEAD_MEAN, RECEIVED
from pallas_kernels.choice import Platform


class Choice(NamedTuple):
    """The implementation that an operation takes on one platform.

    Attributes:
      operation: its name.
      queries: query positions of each sequence that it is called with.
      platform: "cpu", "cuda" or "tpu".
      implementation: "pallas", "pallas, interpreted", or "xla: " and why that is not a kernel.
    """

    operation: str
    queries: int
    platform: str
    implementation: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A table; `print` it.

    Attributes:
      rows: one for each operation, number of queries and platform.
      unused: (operation, why it is not called).
    """

    rows: tuple[Choice, ...]
    unused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        table = [("operation", "queries", "platform", "implementation"), *self.rows]
        cells = [[str(cell) for cell in row] for row in table]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells
        ]
        return "\n".join([*(line.rstrip() for line in lines), *map(": ".join, self.unused)])


class Call(NamedTuple):
    """An operation that a layer calls, with the shapes of its arrays."""

    operation: Operation
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    mask: jax.ShapeDtypeStruct | None

    def explain(self, model: Model) -> dict[Platform, str]:
        """What the operation takes on each platform, as `dllm_jax.nn.kernels` calls it."""
        return self.operation.explain((*self.arrays, self.mask, None), {}, model.implementation)


@dataclasses.dataclass(frozen=True)
class Recording(Layer):
    """A layer that records which operations are called with what.

    Attributes:
      calls: those made so far.
    """

    calls: list[Call] = dataclasses.field(default_factory=list)

    @override
    def attention(
        self,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b s k d"],
        v: Float[Array, "b s k d"],
        mask: Mask | None = None,
    ) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
        self._note(ATTENTION, mask, q, k, v)
        return super().attention(q, k, v, mask)

    @override
    def received(
        self,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b s k d"],
        lse: Float[Array, "b h q"],
        weight: Float[Array, "b q"],
        mask: Mask | None = None,
    ) -> Float[Array, "b k s"]:
        self._note(RECEIVED, mask, q, k, lse, weight)
        return super().received(q, k, lse, weight, mask)

    @override
    def head_mean(
        self,
        q: Float[Array, "b q h d"],
        k: Float[Array, "b s k d"],
        lse: Float[Array, "b h q"],
        mask: Mask | None = None,
    ) -> Float[Array, "b q s"]:
        self._note(HEAD_MEAN, mask, q, k, lse)
        return super().head_mean(q, k, lse, mask)

    def _note(self, operation: Operation, mask: Mask | None, *arrays: Array) -> None:
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.calls.append(Call(operation, tuple(map(shape, arrays)), None if mask is None else shape(mask)))


def explain(model: Model, batch: int, layout: Layout, policy: Policy | None = None) -> Explanation:
    """Which implementation attention, and what is read from it, takes in a generation on each platform.

    Every kind of step is traced and the calls of its layers are recorded; nothing is computed or compiled.

    Args:
      model: from `load`; its `implementation` is respected.
      batch: sequences, twice as many with guidance.
      layout: geometry of the generation.
      policy: None is the exact decoder.

    Returns:
      a table.
    """
    policy = Policy() if policy is None else policy
    widths = (*step_widths(policy, layout), None)
    calls = [call for width in widths for call in _calls(model, batch, layout, policy, width)]
    rows = dict.fromkeys(
        Choice(call.operation.name, call.arrays[0].shape[1], platform, implementation)
        for call in calls
        for platform, implementation in call.explain(model).items()
    )
    called = {call.operation.name for call in calls}
    seams = {operation.name for operation in SEAMS}
    why = lambda name: "not called by this policy" if name in seams else "not used by the engine"
    names = (operation.name for operation in OPERATIONS)
    return Explanation(tuple(rows), tuple((name, why(name)) for name in names if name not in called))


def _calls(model: Model, batch: int, layout: Layout, policy: Policy, width: int | None) -> list[Call]:
    """What the layers call in a step over `width` rows, or over the whole canvas (None)."""
    calls: list[Call] = []

    def layers(model: Model, tokens: Int[Array, "b l"], valid: Bool[Array, "b l"]) -> Any:
        canvas = begin(tokens, valid, model.spec, layout)
        rows = computed_rows(canvas.everything, width)
        cache = empty_cache(model, policy, layout, batch)
        cache = policy.before_layers(policy.before_first_step(cache, canvas, model, tokens), canvas, rows)

        def layer(layer: Layer, *rest):
            recording = Recording(
                layer.weights, layer.spec, layer.rope, layer.index, layer.implementation, calls
            )
            return policy.layer(recording, *rest)

        rope = rope_table(layout.length, model.spec.head, model.spec.rope_base)
        return network(model, rope, layer, tokens, canvas, rows, cache)

    shape = batch, layout.length
    jax.eval_shape(
        layers, model, jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    )
    return calls
