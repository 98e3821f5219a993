"""Explains the kernels of attention, eviction and experts in a generation, by `pallas_kernels.choice`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int
from typing_extensions import override

from dllm_jax.decoding.compare import text_table
from dllm_jax.engine.beginning import empty_cache
from dllm_jax.engine.generation import Generation, Inputs, Plan
from dllm_jax.engine.step import computed_rows, network
from dllm_jax.engine.widths import Variant, phase_names, step_widths
from dllm_jax.nn.kernels import Kernels
from dllm_jax.nn.layer import embed
from dllm_jax.nn.mesh import number_modes, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.policies.base import Policy, for_model
from dllm_jax.samplers import Confidence
from dllm_jax.state.contexts import new_canvas
from dllm_jax.state.layout import Layout
from pallas_kernels import OPERATIONS, Operation, experts


class Choice(NamedTuple):
    """The implementation that an operation takes on one platform.

    Attributes:
      operation: its name.
      positions: query positions of attention, or candidates that an eviction chooses or copies from; of
        experts the positions of all sequences (of a mesh's device, of its own).
      platform: "cpu", "cuda" or "tpu".
      implementation: "pallas", "pallas, interpreted", "triton", "mosaic_gpu", "cudnn" or "xla"; after it, in
        brackets, what says that it is the best one here; or "xla: " and why it is none of the others.
    """

    operation: str
    positions: int
    platform: str
    implementation: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A table; `print` it.

    Attributes:
      rows: one for each operation, number of positions and platform.
      unused: (operation, why it is not called).
      vocabulary: (embedding or head, its size and who reads it).
    """

    rows: tuple[Choice, ...]
    unused: tuple[tuple[str, str], ...]
    vocabulary: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        table = [("operation", "positions", "platform", "implementation"), *self.rows]
        return "\n".join([text_table(table), *map(": ".join, self.unused + self.vocabulary)])


class Call(NamedTuple):
    """An operation that a layer calls, with the shapes of its arrays."""

    operation: Operation
    arrays: tuple[Any, ...]
    options: dict[str, Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StepRecording(Kernels):
    """Kernels that record which operations are called with what.

    Attributes:
      calls: those made so far.
    """

    calls: list[Call] = dataclasses.field(default_factory=list, compare=False)

    @override
    def run(self, operation: Operation, *arrays: Any, **options: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        self.calls.append(Call(operation, shapes, options))
        return super().run(operation, *arrays, **options)


@dataclasses.dataclass(frozen=True)
class Recorded(Model):
    """A model whose kernels record what they are called with."""

    calls: list[Call] = dataclasses.field(default_factory=list)

    @property
    @override
    def kernels(self) -> Kernels:
        return StepRecording(self.implementation, self.rules, self.calls)


@number_modes()
def explain_kernels(model: Model, batch: int, layout: Layout, policy: Policy | None = None) -> Explanation:
    """Lists the kernels that attention, eviction and experts use in a generation, on each platform.

    Every kind of step is traced and the calls of its layers are recorded; nothing is computed or compiled.

    Args:
      model: Model returned by `load`; its `implementation` is respected.
      batch: sequences, twice as many with guidance.
      layout: geometry of the generation.
      policy: Cache policy. Default: exact decoding.

    Returns:
      a table.

    Raises:
      ValueError: an argument of another kind, or a policy that the model does not support.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    batch = check_argument("batch", batch, PositiveInt)
    check_argument("layout", layout, Layout, ", such as dj.Layout(prompt=64, response=32, block=8, steps=32)")
    check_argument("policy", policy, Policy | None, ", such as dj.policies.DualCache()")
    policy = for_model(Policy() if policy is None else policy, model.spec)

    # A partial step of each width and phase, and the full one: what a kernel supports depends on shapes.
    widths = step_widths(policy, model.spec, layout)
    variants = *(Variant(width, phase) for width in widths for phase in phase_names(policy)), Variant(None)
    calls = [call for variant in variants for call in _calls(model, batch, layout, policy, variant)]

    # Layers call the same: equal choices are one row, in the order of the first of them.
    rows = dict.fromkeys(
        Choice(call.operation.name, call.operation.positions(call.arrays), platform, implementation)
        for call in calls
        for platform, implementation in call.operation.explain(
            call.arrays, call.options, model.implementation
        ).items()
    )
    called = {call.operation.name for call in calls}
    without = {experts.OPERATION.name} if model.spec.experts is None else set()
    unused = (operation.name for operation in OPERATIONS if operation.name not in called | without)
    unused = tuple((name, "not called by this policy") for name in unused)
    return Explanation(tuple(rows), unused, _vocabulary(model))


def _vocabulary(model: Model) -> tuple[tuple[str, str], ...]:
    """Describes embedding and head, which no kernel computes and of which small models mostly consist."""

    def said(part: str, read: str) -> str:
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.params[part]))
        return f"{model.spec.vocab} x {model.spec.width}, {size / 1e9:.3g} GB; {read}"

    head = "embed" if model.spec.tied else "head"
    embedding = said("embed", "a step reads the rows of its tokens")
    return ("embedding", embedding), ("head", said(head, "a step reads all of it"))


def _calls(model: Model, batch: int, layout: Layout, policy: Policy, variant: Variant) -> list[Call]:
    """Records the operations that the layers call in a kind of steps."""
    calls: list[Call] = []

    def layers(model: Model, tokens: Int[Array, "b l"], valid: Bool[Array, "b l"]) -> Any:
        canvas = new_canvas(tokens, valid, model.spec, layout)
        rows = computed_rows(canvas.everything, variant, canvas, policy)
        cache = empty_cache(model, policy, layout, batch)
        cache = policy.before_first_step(cache, canvas, model, embed(model.params, tokens))
        recorded = Recorded(model.params, model.spec, model.implementation, model.rules, calls=calls)
        plan = Plan(policy, Confidence(), layout, ())
        generation = Generation.of(recorded, Inputs(tokens, valid), plan)
        return network(generation, tokens, canvas, rows, cache)[0]

    # Traced as a generation is: over the model's mesh, if it has one.
    shape = batch, layout.length
    whole = functools.partial(over_mesh, layers, out=PartitionSpec())
    jax.eval_shape(whole, model, *(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.bool_)))
    return calls
