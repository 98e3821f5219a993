"""`attention` and `received` for NVIDIA GPUs (Pallas, Mosaic GPU), and `ragged_attention`.

A program is a warpgroup with 64 queries of a KV head. It walks over its range of the dense pairs, and then
over its range of the head's run, 64 slots at a time; XLA adds up the sums of all ranges. Products are
`mma.sync`, which GPUs of all generations have. The interpreter does not know it and multiplies by
`dot_general`. A program of `received` walks over the queries with its 64 keys.

Right in Mosaic GPU's interpreter and compiled for a described H100 and B200 with jax 0.12 (at most 255
registers, at most 44 bytes spilled); never run on a GPU.
"""

# The types that are checked are those of jax 0.10, which has less of this backend.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.shared import (
    LOWEST,
    OnlineSoftmax,
    by_kv_head,
    by_position,
    check_supported,
    extent,
    lse_column,
    weight_column,
)
from pallas_kernels.attention.xla import Mask
from pallas_kernels.mosaic_gpu import interpreted, named

QUERIES = TILE = 64  # of a tile of queries, and of slots
WIDTHS = (32, 64, 128)
PROGRAMS = 256  # about two for each processor of an H100
MASKED_QUERIES = 128  # that may differ in what they see: masks of whole canvases would take gigabytes
DTYPE = jnp.bfloat16
# Products take few columns of keys and few rows of values at a time, as the whole would not fit the
# registers.
COLUMNS, ROWS = 64, 32
GRID = "range", "sequence", "head", "tile"
LEFT, RIGHT, SUMS = (
    layout(DTYPE) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
)


class Runs(NamedTuple):
    """Each KV head's run of kept pairs, see `pallas_kernels.ragged_attention`.

    Attributes:
      chunk: Size of a run that programs are divided for.
    """

    k: Float[Array, "b s d"]
    v: Float[Array, "b s d"]
    start: Int[Array, "b k"]
    length: Int[Array, "b k"]
    readable: Bool[Array, "b s"] | None
    chunk: int


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """As `xla.attention`.

    Raises:
      NotImplementedError: heads not 32, 64 or 128 wide, no slots, no queries, a mask that differs between
        more than 128 query positions, another dtype than bfloat16, or as
        `pallas_kernels.mosaic_gpu.interpreted`.
    """
    return attend(q, k, v, mask, lengths, None, interpret)


def attend(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None,
    lengths: Int[Array, "b k"] | None,
    runs: Runs | None,
    interpret: bool,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Attention to the dense pairs and the runs, and its log-sum-exp; errors of `attention`."""
    of_runs = {} if runs is None else {"kept_k": runs.k, "kept_v": runs.v}
    check_supported(WIDTHS, k, mask, lengths, MASKED_QUERIES, q=q, v=v, **of_runs)
    if k.dtype != DTYPE:
        raise NotImplementedError(f"{k.dtype}: bfloat16")
    interpreter = interpreted(interpret)
    queries = by_kv_head(q, k.shape[2])
    count = queries.shape[2]
    grouped = _filled(queries, 2, QUERIES)
    operands, tiles = _operands(grouped, k, v, mask, lengths, runs, count)
    *grid, head = grouped.shape
    grid[2] //= QUERIES
    # Few queries keep processors busy if their slots are split.
    each = pl.cdiv(max(tiles), min(max(tiles), max(PROGRAMS // (grid[0] * grid[1] * grid[2]), 1)))
    ranges = pl.cdiv(max(tiles), each)
    name = "attention" if runs is None else "ragged_attention"
    column = jax.ShapeDtypeStruct((ranges, *grouped.shape[:3]), jnp.float32)
    out = jax.ShapeDtypeStruct((*column.shape, head), jnp.float32)
    parts = plgpu.kernel(
        named(name, _kernel, dense=pl.cdiv(tiles[0], ranges), ranges=ranges, interpret=interpret),
        out_type=(column, column, out),
        grid=(ranges, *grid),
        grid_names=GRID,
        scratch_types=(
            *(_tile(head), _tile(head), _tile(head), _tile(TILE)),
            plgpu.SMEM((QUERIES,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
        ),
        # Layouts are given: to infer them takes minutes.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter,
    )(operands)
    top, total, sums = (x[:, :, :, :count] for x in parts)
    of_range = lambda n: OnlineSoftmax(top[n, ..., None], total[n, ..., None], sums[n])
    merged = functools.reduce(OnlineSoftmax.plus, map(of_range, range(ranges)))
    return by_position(*merged.result(), q)


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b k s"]:
    """As `xla.received`.

    Raises:
      NotImplementedError: As `attention`, and any mask that differs between query positions.
    """
    check_supported(WIDTHS, k, mask, lengths, q=q)
    if k.dtype != DTYPE:
        raise NotImplementedError(f"{k.dtype}: bfloat16")
    interpreter = interpreted(interpret)
    batch, slots, kv_heads, head = k.shape
    ends, visible = extent(k, mask, lengths)
    columns = lse_column(lse, kv_heads)[..., 0], weight_column(weight, q.shape[2] // kv_heads)[:, 0, :, 0]
    sent = [_filled(x, x.ndim - 1, QUERIES) for x in columns]
    shown = [] if visible is None else [_filled(visible[:, :, 0].astype(jnp.int32), 2, TILE)]
    tiles = pl.cdiv(slots, TILE)
    sums = plgpu.kernel(
        named("received", _received, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, tiles * TILE), jnp.float32),
        grid=(batch, kv_heads, tiles),
        grid_names=GRID[1:],
        scratch_types=(
            _tile(head),
            _tile(head),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter,
    )(_filled(by_kv_head(q, kv_heads), 2, QUERIES), k, ends, *sent, *shown)
    return sums[..., :slots]


def _received(q_ref, k_ref, ends_ref, lse_ref, weight_ref, *rest, interpret):
    """Sums the attention that the keys of one tile receive, over all tiles of queries."""
    *mask_ref, out_ref, q, k, column, q_copied, k_copied = rest
    b, h, j = (jax.lax.axis_index(name) for name in GRID[1:])
    here, size = pl.ds(j * TILE, TILE), (TILE, QUERIES)
    plgpu.copy_gmem_to_smem(k_ref.at[b, here, h], k, k_copied)  # zeros after the last slot
    plgpu.barrier_wait(k_copied)
    visible = j * TILE + plgpu.broadcasted_iota(jnp.int32, size, 0, layout=SUMS) < ends_ref[b, h]
    for ref in mask_ref:
        shown = ref.at[b, h if ref.shape[1] > 1 else 0, here]
        visible &= _across(plgpu.load(shown, layout=SUMS.reduce(1), optimized=False), QUERIES) != 0

    def add(i, total):
        queries = pl.ds(i * QUERIES, QUERIES)
        plgpu.commit_smem()  # what was read of the tile before comes first
        plgpu.copy_gmem_to_smem(q_ref.at[b, h, queries], q, q_copied)
        plgpu.barrier_wait(q_copied)
        by_query = lambda ref: plgpu.layout_cast(
            jax.lax.broadcast_in_dim(plgpu.load(ref, layout=SUMS.reduce(0), optimized=False), size, (1,)),
            SUMS,
        )
        lse, weight = by_query(lse_ref.at[b, h, queries]), by_query(weight_ref.at[b, queries])
        # exp(score - inf) is 0, where score - (-inf) would be infinite. Queries of weight 0 may be NaN.
        attended = jnp.exp(_scores(k, q, interpret) - jnp.where(lse > -jnp.inf, lse, jnp.inf))
        return total + jnp.sum(jnp.where(visible & (weight != 0), attended * weight, 0.0), axis=1)

    zeros = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), SUMS.reduce(1))
    column[...] = jax.lax.fori_loop(0, q_ref.shape[2] // QUERIES, add, zeros)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(column, out_ref.at[b, h, here])
    plgpu.wait_smem_to_gmem(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Operands:
    """Arrays of the kernel, or their references in it; what is None is not asked for.

    Attributes:
      ends: Number of dense slots of each KV head, up to its last visible one.
      mask: 1 where queries may attend to a slot: of each query as they are grouped, or of all of them.
      seen: 1 where any query may.
      start, length: Each KV head's run.
    """

    q: Any
    k: Any
    v: Any
    ends: Any
    mask: Any = None
    seen: Any = None
    kept_k: Any = None
    kept_v: Any = None
    start: Any = None
    length: Any = None
    readable: Any = None


def _operands(
    grouped: Float[Array, "b k n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None,
    lengths: Int[Array, "b k"] | None,
    runs: Runs | None,
    count: int,
) -> tuple[_Operands, tuple[int, ...]]:
    """The arrays, none with fewer slots than a tile, and how many tiles there are of pairs and of a run."""
    ends, visible = extent(k, mask, lengths)
    slots = lambda x, axis=1: x if x.shape[axis] >= TILE else _filled(x, axis, TILE)
    operands = _Operands(grouped, slots(k), slots(v), ends)
    if visible is not None:
        shown = visible.astype(jnp.int32)
        seen = slots(jnp.max(shown, axis=2), 2)
        if shown.shape[2] > 1:
            shown = _filled(jnp.tile(shown, (1, 1, count // shown.shape[2], 1)), 2, QUERIES)
        operands = dataclasses.replace(operands, mask=slots(shown, 3), seen=seen)
    if runs is None:
        return operands, (pl.cdiv(k.shape[1], TILE),)
    start, length = (x.astype(jnp.int32) for x in (runs.start, runs.length))
    readable = None if runs.readable is None else slots(runs.readable.astype(jnp.int32))
    operands = dataclasses.replace(
        operands, kept_k=slots(runs.k), kept_v=slots(runs.v), start=start, length=length, readable=readable
    )
    return operands, (pl.cdiv(k.shape[1], TILE), pl.cdiv(runs.chunk, TILE))


def _filled(x: Array, axis: int, multiple: int) -> Array:
    """The array with zeros up to a multiple along an axis."""
    after = [(0, -x.shape[i] % multiple if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, after)


def _tile(columns: int) -> Any:
    """64 rows in shared memory, laid out so that warps read them without conflicts."""
    swizzle = min(128, 2 * columns)
    transforms = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((TILE, columns), DTYPE, transforms=transforms)


class _Shared(NamedTuple):
    """A program's references to shared memory: queries, keys, values and weights, and a barrier for
    copies."""

    q: Any
    k: Any
    v: Any
    weight: Any
    copied: Any


def _kernel(*refs, dense: int, ranges: int, interpret: bool):
    """The online softmax of one tile of queries over one range of the dense pairs and of the head's run."""
    x, top_ref, total_ref, sum_ref, q, k, v, weight, column, q_copied, copied = refs
    n, b, h, i = (jax.lax.axis_index(name) for name in GRID)
    here = pl.ds(i * QUERIES, QUERIES)
    plgpu.copy_gmem_to_smem(x.q.at[b, h, here], q, q_copied)
    plgpu.barrier_wait(q_copied)
    add = functools.partial(_add, _Shared(q, k, v, weight, copied), interpret=interpret)

    def add_dense(j, sums):
        base = jnp.minimum(j * TILE, x.k.shape[1] - TILE)  # the last tile begins earlier, not to end later
        slots, within = pl.ds(base, TILE), (j * TILE - base, x.ends[b, h] - base)
        shown = seen = None
        if x.mask is not None:
            of = h if x.mask.shape[1] > 1 else 0  # one mask for all KV heads, or one for each
            several = x.mask.shape[2] > 1
            shown = x.mask.at[b, of, here, slots] if several else x.mask.at[b, of, 0, slots]
            seen = x.seen.at[b, of]
        return add(sums, x.k.at[b, slots, h], x.v.at[b, slots, h], base, within, shown, seen)

    def add_kept(j, sums):
        first = x.start[b, h] + j * TILE
        base = jnp.minimum(first, x.kept_k.shape[1] - TILE)
        slots, within = pl.ds(base, TILE), (first - base, x.start[b, h] + x.length[b, h] - base)
        shown, seen = (None, None) if x.readable is None else (x.readable.at[b, slots], x.readable.at[b])
        return add(sums, x.kept_k.at[b, slots], x.kept_v.at[b, slots], base, within, shown, seen)

    sums = _nothing(q.shape[1])
    last = jnp.minimum((n + 1) * dense, pl.cdiv(x.ends[b, h], TILE))
    sums = jax.lax.fori_loop(n * dense, last, add_dense, sums)
    if x.kept_k is not None:
        tiles = pl.cdiv(x.length[b, h], TILE)
        each = pl.cdiv(tiles, ranges)
        sums = jax.lax.fori_loop(n * each, jnp.minimum((n + 1) * each, tiles), add_kept, sums)
    top, total, out = sums
    plgpu.store(sum_ref.at[n, b, h, here], out, optimized=False)
    for value, ref in ((top, top_ref), (total, total_ref)):
        column[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(column, ref.at[n, b, h, here])
        plgpu.wait_smem_to_gmem(0)


def _nothing(head: int) -> tuple[Array, Array, Array]:
    """The sums before the first tile: largest score and sum of weights by query, and weighted values."""
    rows = SUMS.reduce(1)
    full = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    out = full((QUERIES, head), 0.0, SUMS)
    return full((QUERIES,), LOWEST, rows), full((QUERIES,), 0.0, rows), out


def _add(
    at: _Shared,
    sums: tuple,
    k: Any,
    v: Any,
    base: Any,
    within: tuple,
    shown: Any,
    seen: Any,
    *,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """The sums with one more tile of slots.

    Args:
      at: Shared memory.
      sums: As `_nothing`.
      k: Where the tile's keys lie.
      v: Where its values lie.
      base: The tile's first slot.
      within: First slot that counts and the one after the last, from `base` on.
      shown: Where its mask lies, by query or for all of them; None shows everything within.
      seen: Where 1 says of each slot, of any tile, that any query sees it; None if all do.
      interpret: Whether the kernel is interpreted.
    """
    top, total, out = sums
    plgpu.commit_smem()  # what was read of the tile before comes first
    plgpu.copy_gmem_to_smem(k, at.k, at.copied)
    plgpu.copy_gmem_to_smem(v, at.v, at.copied)
    plgpu.barrier_wait(at.copied)
    visible = _visible(within, shown)
    scores = jnp.where(visible, _scores(at.q, at.k, interpret), LOWEST)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    rescale = jnp.exp(top - higher)
    weight = jnp.where(visible, jnp.exp(scores - _across(higher, TILE)), 0.0)
    at.weight[...] = weight.astype(DTYPE)  # to be read as the left operand of a product
    weighted = _weighted(at, out * _across(rescale, out.shape[1]), base, within, seen, interpret)
    return higher, total * rescale + jnp.sum(weight, axis=1), weighted


def _visible(within: tuple, shown: Any) -> Bool[Array, "n t"]:
    slot = plgpu.broadcasted_iota(jnp.int32, (QUERIES, TILE), 1, layout=SUMS)
    visible = (slot >= within[0]) & (slot < within[1])
    if shown is None:
        return visible
    if len(shown.shape) == 2:
        return visible & (plgpu.load(shown, layout=SUMS, optimized=False) != 0)
    row = plgpu.load(shown, layout=SUMS.reduce(0), optimized=False)
    return visible & (plgpu.layout_cast(jax.lax.broadcast_in_dim(row, visible.shape, (1,)), SUMS) != 0)


def _scores(left: Any, right: Any, interpret: bool) -> Float[Array, "n t"]:
    """Scaled products of the rows of two tiles in shared memory."""
    (_, head), size = left.shape, (left.shape[0], right.shape[0])
    scores = plgpu.layout_cast(jnp.zeros(size, jnp.float32), SUMS)
    for first in range(0, head, min(head, COLUMNS)):
        part = pl.ds(first, min(head, COLUMNS))
        turned = plgpu.load(right.at[:, part].transpose((1, 0)), layout=RIGHT)
        scores = _product(scores, plgpu.load(left.at[:, part], layout=LEFT), turned, interpret)
    return scores * head**-0.5


def _weighted(
    at: _Shared, out: Float[Array, "n d"], base: Any, within: tuple, seen: Any, interpret: bool
) -> Float[Array, "n d"]:
    """Adds the weighted values of the tile; those that no query sees count as 0, as they may be NaN."""
    weight = plgpu.load(at.weight, layout=LEFT)
    for first in range(0, TILE, ROWS):
        values = plgpu.load(at.v.at[pl.ds(first, ROWS)], layout=RIGHT)
        slot = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=RIGHT)
        real = (slot >= within[0]) & (slot < within[1])
        if seen is not None:
            column = plgpu.load(seen.at[pl.ds(base + first, ROWS)], layout=RIGHT.reduce(1), optimized=False)
            real &= plgpu.layout_cast(jax.lax.broadcast_in_dim(column, values.shape, (0,)), RIGHT) != 0
        values = jnp.where(real, values, jnp.zeros((), DTYPE))
        out = _product(out, weight[:, first : first + ROWS], values, interpret)
    return out


def _across(column: Float[Array, "n"], width: int) -> Float[Array, "n width"]:
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(column, (len(column), width), (0,)), SUMS)


def _product(
    sums: Float[Array, "n o"], x: Float[Array, "n i"], y: Float[Array, "i o"], interpret: bool
) -> Float[Array, "n o"]:
    """`sums + x @ y` in float32."""
    if interpret:
        return sums + jax.lax.dot(x, y, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, x, y)
