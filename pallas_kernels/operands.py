"""Operands, bytes and FLOPs of the operations, at the shapes that tests, checks and benches use."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels.attention.shapes as attention_shapes
import pallas_kernels.experts.shapes as expert_shapes
import pallas_kernels.ragged_attention.shapes as ragged_shapes
import pallas_kernels.sparse_gather.shapes as gather_shapes
import pallas_kernels.topk_evict.xla as topk_shapes
from pallas_kernels import OPERATIONS, Operation


class Operands(NamedTuple):
    """Arrays of one call, static keywords, FLOPs of products; `read`: bytes to read, all arrays' if None."""

    arrays: tuple[Any, ...]
    options: Mapping[str, Any] = {}
    flops: float = 0.0
    read: float | None = None

    def bytes(self, out: Any) -> float:
        """The fewest bytes that must be read and written, given the result's shapes."""
        size = lambda tree: float(sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree)))
        return (size(self.arrays) if self.read is None else self.read) + size(out)


class Family(NamedTuple):
    """An operation with shapes for CPUs and of real models; `make` makes operands of a shape in a dtype."""

    operation: Operation
    small: list[Any]
    models: Mapping[str, Any]
    make: Callable[[Any, Any], Operands]

    def shapes(self, small: bool) -> Iterator[tuple[str, Any]]:
        """Names and shapes."""
        yield from ((str(tuple(s)), s) for s in self.small) if small else self.models.items()


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _queries(shape: attention_shapes.Shape, dtype: Any) -> tuple[Any, ...]:
    """q, k, v, mask, lengths; every tenth slot is hidden by a mask, the last tenth by lengths."""
    batch, slots, kv_heads = shape.batch, shape.slots, shape.kv_heads
    q = _normal(0, (batch, shape.queries, shape.heads, shape.head), dtype)
    k, v = (_normal(seed, (batch, slots, kv_heads, shape.head), dtype) for seed in (1, 2))
    mask = lengths = None
    if shape.visible in ("keys", "keys per head", "both"):
        visible = jnp.arange(slots) % 10 != 9
        mask = jnp.broadcast_to(visible, (batch, 1 if shape.visible == "keys" else kv_heads, 1, slots))
    if shape.visible == "keys per query":
        last = slots - shape.queries + jnp.arange(1, shape.queries + 1)
        mask = jnp.broadcast_to(jnp.arange(slots) < last[:, None], (batch, 1, shape.queries, slots))
    if shape.visible in ("lengths", "both"):
        lengths = jnp.full((batch, kv_heads), max(slots * 9 // 10, 1), jnp.int32)
    return q, k, v, mask, lengths


def _product(shape: attention_shapes.Shape) -> float:
    """FLOPs of the scores, hidden slots included."""
    return 2.0 * shape.batch * shape.queries * shape.slots * shape.heads * shape.head


def _attention(shape: attention_shapes.Shape, dtype: Any) -> Operands:
    return Operands(_queries(shape, dtype), flops=2 * _product(shape))


def _head_mean(shape: attention_shapes.Shape, dtype: Any, weighted: bool = False) -> Operands:
    q, k, _, mask, lengths = _queries(shape, dtype)
    # any number serves as log-sum-exp here: the work is the same
    lse = jnp.full((shape.batch, shape.heads, shape.queries), 10.0, jnp.float32)
    weight = (jnp.ones((shape.batch, shape.queries), jnp.float32),) if weighted else ()
    return Operands((q, k, lse, *weight, mask, lengths), flops=_product(shape))


_received = functools.partial(_head_mean, weighted=True)


def _ragged(shape: ragged_shapes.Shape, dtype: Any) -> Operands:
    """Runs of different lengths, whose mean is `run`; one after another, as an eviction stores them."""
    b, t, kv_heads, head = shape.batch, shape.dense, shape.kv_heads, shape.head
    room = shape.run * kv_heads
    q = _normal(0, (b, shape.queries, shape.heads, head), dtype)
    k, v = (_normal(seed, (b, t, kv_heads, head), dtype) for seed in (1, 2))
    kept_k, kept_v = (_normal(seed, (b, room, head), dtype) for seed in (3, 4))
    # Every other head gives half of its share to its neighbor, as far as a run may be wide.
    given = np.minimum(shape.run // 2, shape.widest - shape.run)
    length = shape.run + given * np.where(np.arange(kv_heads) % 2, 1, -1)
    start = np.cumsum(length) - length
    runs = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), (b, kv_heads)) for x in (start, length))
    mask = readable = None
    if shape.masked:
        mask = jnp.broadcast_to(jnp.arange(t) % 10 != 9, (b, 1, 1, t))
        readable = jnp.broadcast_to(jnp.arange(room) % 10 != 9, (b, room))
    pairs = 2.0 * b * (t * kv_heads + length.sum()) * head
    arrays = q, k, v, kept_k, kept_v, *runs, mask, readable
    flops = 2 * shape.queries * (shape.heads // kv_heads) * pairs
    options = dict(chunk=min(shape.run, shape.widest), widest=shape.widest)
    return Operands(arrays, options, flops, q.nbytes + pairs * k.dtype.itemsize)


def _gather(shape: gather_shapes.Shape, dtype: Any) -> Operands:
    pairs = (shape.batch, shape.slots, shape.kv_heads, shape.head)
    k, v = _normal(0, pairs, dtype), _normal(1, pairs, dtype)
    count = min(shape.width, shape.slots)
    order = jax.random.uniform(jax.random.key(2), (shape.batch, shape.kv_heads, shape.slots))
    index = jnp.sort(jnp.argsort(order, axis=-1)[..., :count], axis=-1).astype(jnp.int32)
    index = jnp.pad(index, ((0, 0), (0, 0), (0, shape.width - count)), constant_values=shape.slots)
    read = index.nbytes + 2.0 * k.dtype.itemsize * index[..., :count].size * shape.head
    return Operands((k, v, index), read=read)


def _evict(shape: topk_shapes.Shape, dtype: Any) -> Operands:
    score = _normal(0, (shape.batch, shape.heads, shape.length), jnp.float32)
    count = jnp.full((shape.batch, shape.heads), max(shape.width * 3 // 4, 1), jnp.int32)
    return Operands((score, count), dict(width=shape.width))


def _experts(shape: expert_shapes.Shape, dtype: Any) -> Operands:
    """Tokens sent to random experts; read are the matrices of those that any token is sent to."""
    t, c, e, m, i = shape
    chosen = np.argsort(np.random.default_rng(0).random((t, e)), axis=1)[:, :c].astype(np.int32)
    weight = jnp.full((t, c), 1 / c, jnp.float32)
    matrices = [_normal(k, size, dtype) for k, size in enumerate(((e, m, i), (e, m, i), (e, i, m)), 1)]
    read = np.unique(chosen).size * 3.0 * m * i * matrices[0].dtype.itemsize
    arrays = _normal(4, (t, m), dtype), jnp.asarray(chosen), weight
    flops = 6.0 * t * c * m * i
    return Operands(
        (*arrays, *matrices, None, None, None), flops=flops, read=read + sum(x.nbytes for x in arrays)
    )


MAKE: Mapping[str, tuple[Any, Callable[[Any, Any], Operands]]] = {
    "attention": (attention_shapes, _attention),
    "attention_and_lse": (attention_shapes, _attention),
    "received": (attention_shapes, _received),
    "head_mean": (attention_shapes, _head_mean),
    "ragged_attention": (ragged_shapes, _ragged),
    "sparse_gather": (gather_shapes, _gather),
    "topk_evict": (topk_shapes, _evict),
    "experts": (expert_shapes, _experts),
}
_NAMED = {operation.name: operation for operation in OPERATIONS}
FAMILIES = tuple(Family(_NAMED[name], of.SMALL, of.MODELS, make) for name, (of, make) in MAKE.items())
