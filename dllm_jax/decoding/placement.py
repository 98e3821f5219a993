"""The second of three rooms: a request's arrays on the devices of a model, and results back from them.

Sequences are split over the axes of the mesh that split batches; where they do not divide, there are more of
them, of padding alone, which compute nothing.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from dllm_jax.decoding.output import Output
from dllm_jax.decoding.request import Request
from dllm_jax.engine.features.logprobs import LogProbs
from dllm_jax.engine.features.trace import Trace
from dllm_jax.engine.generation import Inputs, Plan
from dllm_jax.engine.group import group_size
from dllm_jax.engine.stats import NonFinite, Stats
from dllm_jax.engine.widths import step_phases
from dllm_jax.interrupts import uninterrupted
from dllm_jax.nn.mesh import AnyMesh, context_mesh, current_mesh, over_mesh, replicated
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import Params
from dllm_jax.samplers import RecordedNoise
from dllm_jax.state import host
from dllm_jax.state.host import AnyArray

NOT_SPLIT = -1  # instead of an array's axis of sequences


class Placed(NamedTuple):
    """A request where programs take it: `denoise(model, inputs, plan)`.

    Attributes:
      model: without the tower of images, which nothing that decodes reads.
      inputs: Inputs on the devices, split by sequence.
      plan: its numbers on the devices.
      mesh: None without one.
      batch: Number of sequences; padding sequences after them compute nothing.
      extra: positions a bucket added on the left.
      nonfinite: Action of the host for sequences without finite logits.
    """

    model: Model
    inputs: Inputs
    plan: Plan
    mesh: AnyMesh | None
    batch: int
    extra: int
    nonfinite: NonFinite

    @property
    def shown(self) -> slice:
        """The positions of prompt, response and suffix on the canvas."""
        return slice(self.extra, self.plan.layout.shown)


def place(model: Model, request: Request, prompt: Any = None) -> Placed:
    """The request on the devices of the model, or on those of its prompt.

    Args:
      model: Model of arrays, traced or described (`dllm_jax.abstract`); the request is then described too.
      request: Request made by `prepare`.
      prompt: Prompt as passed by the user, whose mesh counts if the model has none.
    """
    mesh = current_mesh((model.params, prompt))
    arrays = request.inputs
    axes = jax.tree.map(lambda array: 0, arrays)
    if isinstance(arrays.noise, RecordedNoise):  # [t b ..], and numbers
        axes = axes._replace(noise=jax.tree.map(lambda a: 1 if a.ndim else NOT_SPLIT, arrays.noise))

    # Sequences that a mesh needs besides are of padding alone: they are done before the first step.
    arrays, batch = divisible(model, mesh, arrays, axes)
    if len(arrays.valid) > batch:
        real = np.arange(len(arrays.valid))[:, None] < batch
        arrays = arrays._replace(valid=arrays.valid & real)
    split = by_sequence(model, mesh, arrays, axes)
    plan = request.plan if _described(model) else numbers(request.plan, mesh)
    group = plan.group
    if group is None and not plan.layout.compiles_longer_than_it_runs(model.spec):
        group = group_size(plan.policy, model.spec, plan.layout, _device(model).platform)
    shares = model.rules.batch_ways(mesh)
    sequences = len(arrays.tokens) * plan.streams // shares
    phases = step_phases(plan.policy, model.spec, plan.layout, plan.widths, sequences, _device(model))
    plan = dataclasses.replace(plan, group=group, phases=phases, shares=shares)
    without = dataclasses.replace(model, vision=None, params=_with_devices(model, arrays))
    return Placed(without, split, plan, mesh, batch, request.extra, request.nonfinite)


def collect(
    placed: Placed, tokens: Any, stats: Stats, trace: Trace | None, logprobs: LogProbs | None = None
) -> Output:
    """The output without what was added: sequences of a mesh, positions of a bucket and of a last block.

    Of arrays on the host, arrays on the host.

    Args:
      placed: the request.
      tokens: Tokens as returned by programs.
      stats: Statistics of the same sequences.
      trace: Trace with room for more steps than ran; None if none was recorded.
      logprobs: Log-probabilities of the same sequences; None if none were recorded.
    """
    rows, right = slice(placed.batch), placed.shown
    tokens = part(tokens, rows, right, batch=0)
    stats = jax.tree.map(lambda array: part(array, rows, batch=0), stats)
    logprobs = jax.tree.map(lambda array: part(array, rows, right, batch=0), logprobs)
    if trace is None:
        return Output(tokens, stats, None, logprobs)

    # Inside jit shapes are static: the trace has room for the upper bound of steps.
    ran = slice(None) if isinstance(trace.steps, Tracer) else slice(int(host.values(trace.steps)))
    and_before = slice(ran.stop and ran.stop + 1)
    index = dict.fromkeys(("computed", "read", "proposed", "score", "removed"), (ran, rows, right))
    index |= dict.fromkeys(("active", "widened", "causal", "inserted", "moved"), (ran, rows))
    index |= {"tokens": (and_before, rows, right), "length": (and_before, rows), "end": (and_before, rows)}
    fields = {name: array for name, array in trace._asdict().items() if name in index and array is not None}
    cut = {name: part(array, *index[name], batch=1) for name, array in fields.items()}
    if "end" in cut:
        cut["end"] = cut["end"] - placed.extra
    cut["start"] = part(trace.start, rows, batch=0) - placed.extra
    if trace.sampler_steps is not None:
        cut["sampler_steps"] = part(trace.sampler_steps, rows, batch=0)
    return Output(tokens, stats, trace._replace(**cut), logprobs)


def with_auto_axes(placed: Placed) -> Placed:
    """The same with Auto axes in place of Explicit ones, as pieces of a generation need; nothing moves.

    What a loop carries has leaves on and off the axis of sequences, and no table of Explicit types.
    """
    if not isinstance(placed.mesh, Mesh) or not placed.mesh.abstract_mesh.explicit_axes:
        return placed
    names = placed.mesh.axis_names
    auto = Mesh(placed.mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
    model, inputs, plan = on_mesh(placed[:3], auto)
    return placed._replace(model=model, inputs=inputs, plan=plan, mesh=auto)


def on_mesh(tree: PyTree, mesh: AnyMesh | None) -> PyTree:
    """Arrays that lie on a mesh of the same devices, as ones of this mesh; None leaves them."""

    def moved(array: Any) -> Any:
        where = getattr(array, "sharding", None)
        if not isinstance(where, NamedSharding) or not isinstance(mesh, Mesh):
            return array
        return jax.device_put(array, NamedSharding(mesh, where.spec))

    return jax.tree.map(moved, tree)


@contextlib.contextmanager
def runs_on(placed: Placed) -> Iterator[None]:
    """Sets the mesh of a placed request, if the user's is another one, while its programs are started.

    Ctrl-C waits until they are: an interrupt of XLA's compiler can crash the process.
    """
    other = context_mesh() not in (None, placed.mesh)
    mesh = jax.set_mesh(placed.mesh) if other and isinstance(placed.mesh, Mesh) else contextlib.nullcontext()
    with uninterrupted(), mesh:
        yield


def traced_for(model: Model) -> AbstractContextManager[object]:
    """Names the GPU that programs of a described model are for; within it, they are traced.

    Pallas asks the mesh of the context, be it empty (jax 0.12; jax 0.10 does not ask).
    """
    device = _device(model)
    if not _described(model) or device.platform not in ("gpu", "cuda"):
        return contextlib.nullcontext()
    named = AbstractDevice(device.device_kind, getattr(device, "core_count", None), device.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=named))


def divisible(model: Model, mesh: AnyMesh | None, arrays: PyTree, axes: PyTree[int]) -> tuple[PyTree, int]:
    """Arrays of as many sequences as a mesh divides, the first one again after them; and how many there are.

    Args:
      model: Model whose sharding rules apply.
      mesh: None needs no more sequences.
      arrays: a pytree, on the host unless they are traced or global.
      axes: the axis of sequences of each array, or `NOT_SPLIT`.
    """
    sizes = jax.tree.map(lambda array, axis: array.shape[axis] if axis != NOT_SPLIT else None, arrays, axes)
    batch = jax.tree.leaves(sizes)[0]
    count = -batch % model.rules.batch_ways(mesh)
    more = lambda array, axis: _more(array, axis, count) if axis != NOT_SPLIT else array
    return jax.tree.map(more, arrays, axes) if count else arrays, batch


def by_sequence(model: Model, mesh: AnyMesh | None, arrays: PyTree, axes: PyTree[int]) -> PyTree:
    """Arrays of a request on the devices, split by sequence; arguments are those of `divisible`.

    Of a described model they are described. Where the program is traced they stay what they are: concrete
    arrays among traced ones are constants of the user's program, which splits them itself.
    """
    names = () if mesh is None else model.rules.axes(mesh, "b")
    where = lambda axis: (
        PartitionSpec(*[None] * axis, names or None) if axis != NOT_SPLIT else PartitionSpec()
    )
    if _described(model):
        on = lambda axis: None if mesh is None else NamedSharding(mesh, where(axis))
        describe = lambda a, axis: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on(axis))
        return jax.tree.map(describe, arrays, axes)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, arrays))):
        return arrays
    return jax.tree.map(lambda array, axis: _on_devices(array, mesh, where(axis)), arrays, axes)


def not_split(model: Model, mesh: AnyMesh | None, arrays: PyTree) -> PyTree:
    """Arrays of a request on the devices, the same on all of a mesh."""
    return by_sequence(model, mesh, arrays, jax.tree.map(lambda array: NOT_SPLIT, arrays))


def _with_devices(model: Model, arrays: PyTree) -> Params:
    """The parameters, which tell a user's traced program their devices if it closes over the model.

    Of such a program no argument lies on the mesh: XLA would compile it for one device.
    """
    embedding = model.params["embed"]
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays))
    if not traced or _described(model) or not isinstance(model.mesh, Mesh):
        return model.params
    return {**model.params, "embed": jax.device_put(embedding, embedding.sharding)}


def _device(model: Model) -> jax.Device:
    """Returns a device that a program runs on; one of the default platform inside traced programs."""
    sharding = None if isinstance(model.params["embed"], Tracer) else model.params["embed"].sharding
    return jax.local_devices()[0] if sharding is None else next(iter(sharding.device_set))


def _described(model: Model) -> bool:
    """Whether the model is one of shapes alone, for programs that are only compiled."""
    return isinstance(model.params["embed"], jax.ShapeDtypeStruct)


def _more(array: AnyArray, axis: int, count: int) -> AnyArray:
    """The array with `count` more sequences, the first one again."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _more_keys(array, count)
    xp = host.module(array)
    first = array[(slice(None),) * axis + (slice(0, 1),)]
    return xp.concatenate([array, xp.repeat(first, count, axis=axis)], axis=axis)


@functools.partial(jax.jit, static_argnames="count")
def _more_keys(keys: Key[Array, "b"], count: int) -> Key[Array, "b_plus_count"]:
    return jnp.concatenate([keys, jnp.repeat(keys[:1], count, axis=0)])


def _on_devices(array: AnyArray, mesh: AnyMesh | None, spec: PartitionSpec) -> Array:
    """An array of this process, which may hold keys, or a global one, split over the mesh as `spec` says."""
    if not isinstance(mesh, Mesh):
        return array if isinstance(array, jax.Array) else host.put(array, array.dtype)
    where = NamedSharding(mesh, spec)
    if host.is_global(array):
        return array if array.sharding == where else jax.jit(lambda a: a, out_shardings=where)(array)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):  # by way of the numbers that keys are made of
        data = jax.random.key_data(array)
        return jax.random.wrap_key_data(host.put(data, data.dtype, where), impl=jax.random.key_impl(array))
    return host.put(array, array.dtype, where)


def numbers(tree: PyTree, mesh: AnyMesh | None) -> PyTree:
    """Scalars of a request on the devices, the same on all of a mesh; traced ones stay what they are."""
    where = replicated(mesh) if isinstance(mesh, Mesh) else None
    put = lambda number: number if isinstance(number, jax.Array) else host.put(number, number.dtype, where)
    return jax.tree.map(put, tree)


def part(array: Any, *index: slice, batch: int) -> Any:
    """`array[index]`; waits for the array and takes it to the host and back, unless that is all of it.

    Args:
      array: Array on one device, split by sequence over a mesh, or on the host (like the result).
      *index: Index along its axes.
      batch: Axis of the sequences; a result with fewer of them is replicated over the mesh.
    """
    if isinstance(array, np.ndarray):
        return array[index]
    sizes = zip(index, array.shape, strict=False)
    if all(s.indices(size) == (0, size, 1) for s, size in sizes):
        return array
    fewer = index[batch].indices(array.shape[batch]) != (0, array.shape[batch], 1)
    if isinstance(array, Tracer):
        return over_mesh(lambda a: a[index], array, out=PartitionSpec()) if fewer else array[index]
    where = array.sharding if isinstance(array.sharding, NamedSharding) else None
    if where is not None and fewer:
        where = where.update(spec=PartitionSpec())
    if host.is_global(array):
        return (host.whole(array) if fewer else array)[index]
    return host.put(host.values(array)[index], array.dtype, where)
