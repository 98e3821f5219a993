"""`attention`, `received` and `head_mean` for NVIDIA GPUs (Pallas, Triton).

Programs run in no order and share nothing, so each walks by itself over what it sums up:

| kernel | grid | a program |
|---|---|---|
| `attention` | slot range, sequence, KV head, query tile | walks over its slots |
| `merge` | sequence, KV head, query tile | adds up the ranges of its queries |
| `received` | sequence, KV head, slot tile | walks over the queries with its 64 keys |
| `head_mean` | sequence, query tile, slot tile | walks over the KV heads for its positions and 64 slots |

K and V are read as they are named, which is how they lie in memory where this kernel or cuDNN is chosen
(`dllm_jax.xla.order`), and only up to the last visible slot. Triton checks no bounds: what a BlockSpec lays
out is filled up to whole tiles, and everything else is loaded under a mask.

Faster than cuDNN for the queries of a block, slower for a thousand (docs/dev/gpu-steps.md). Pallas'
Triton backend is deprecated since jax 0.11, and Mosaic GPU, which replaces it, wants another kernel.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.shared import (
    OnlineSoftmax,
    by_kv_head,
    check_supported,
    extent,
    lse_column,
    scores,
    weight_column,
    weights,
)
from pallas_kernels.attention.xla import Mask

TILE = 64  # slots
LEAST_QUERIES, MOST_QUERIES = 16, 64  # of a tile; 16 is what tensor cores take at least
WIDTHS = (16, 32, 64, 128)
PROGRAMS = 256  # about two for each processor of an H100
MASKED_QUERIES = 128  # that may differ in what they see: masks of whole canvases would take gigabytes
WHOLE = pl.BlockSpec()  # an array that a program loads parts of by itself


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """As `xla.attention`; the slots are split among programs, whose sums are merged (flash decoding).

    Raises:
      NotImplementedError: heads not 16, 32, 64 or 128 wide, no slots, no queries, a mask that differs between
        more than 128 query positions, or other dtypes than float32 and bfloat16, or two of them.
    """
    check_supported(WIDTHS, k, mask, lengths, MASKED_QUERIES, q=q, v=v)
    ends, visible = extent(k, mask, lengths)
    queries, tiles = Queries.of(q, k.shape[2]), pl.cdiv(k.shape[1], TILE)
    ranges = queries.ranges(tiles)
    others = [k, v, ends] + ([] if visible is None else [visible.astype(jnp.int8)])
    parts = pl.pallas_call(
        functools.partial(_attention, each=pl.cdiv(tiles, ranges), queries=q.shape[1]),
        grid=(ranges, *queries.grid),
        in_specs=[queries.spec, *[WHOLE] * len(others)],
        out_specs=queries.part_specs,
        out_shape=queries.parts(ranges),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention",
    )(queries.grouped, *others)
    return finish(OnlineSoftmax(*parts), q, queries, interpret)


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries in tiles of one KV head.

    Attributes:
      grouped: Queries by the KV head that they read, filled up to whole tiles.
      tile: Number of queries of a tile.
    """

    grouped: Float[Array, "b k n d"]
    tile: int

    @classmethod
    def of(cls, q: Float[Array, "b q h d"], kv_heads: int) -> "Queries":
        """Groups queries."""
        grouped = by_kv_head(q, kv_heads)
        tile, filled = _padding(grouped.shape[2])
        return cls(filled(grouped), tile)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Sequences, KV heads and tiles of queries."""
        batch, kv_heads, count, _ = self.grouped.shape
        return batch, kv_heads, count // self.tile

    def ranges(self, tiles: int) -> int:
        """Number of ranges into which tiles of slots are split, so that few queries keep processors busy."""
        each = pl.cdiv(tiles, min(tiles, max(PROGRAMS // math.prod(self.grid), 1)))
        return pl.cdiv(tiles, each)

    @property
    def spec(self) -> pl.BlockSpec:
        """The i-th tile of KV head h."""
        return pl.BlockSpec((1, 1, self.tile, self.grouped.shape[3]), lambda n, b, h, i: (b, h, i, 0))

    @property
    def part_specs(self) -> list[pl.BlockSpec]:
        """The sums over slot range n, laid out alike, after an axis of ranges."""
        part = lambda width: pl.BlockSpec((1, 1, 1, self.tile, width), lambda n, b, h, i: (n, b, h, i, 0))
        return [part(width) for width in (1, 1, self.grouped.shape[3])]

    def parts(self, ranges: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the sums of all ranges."""
        sums = jax.eval_shape(functools.partial(OnlineSoftmax.empty, self.grouped.shape))
        return [jax.ShapeDtypeStruct((ranges, *x.shape), x.dtype) for x in sums]


def finish(
    parts: OnlineSoftmax, q: Float[Array, "b q h d"], queries: Queries, interpret: bool
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Attention and its log-sum-exp, in the shape and dtype of q, from the sums of all ranges [n b k n d]."""
    ranges, size = len(parts.top), q.shape[1]
    part = lambda width: pl.BlockSpec((ranges, 1, 1, queries.tile, width), lambda b, h, i: (0, b, h, i, 0))
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], size), jnp.float32)
    return pl.pallas_call(
        functools.partial(_merge, queries=size, groups=q.shape[2] // queries.grid[1]),
        grid=queries.grid,
        in_specs=[part(x.shape[-1]) for x in parts],
        out_specs=[WHOLE, WHOLE],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), lse],
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="merge",
    )(*parts)


def _merge(top_ref, total_ref, sum_ref, out_ref, lse_ref, *, queries, groups):
    """Adds up one tile's sums over all ranges, and writes the result where its queries and heads lie."""
    b, h, i = (pl.program_id(axis) for axis in range(3))
    of_range = lambda n: OnlineSoftmax(*(ref[n, 0, 0] for ref in (top_ref, total_ref, sum_ref)))
    sums = of_range(0)
    for n in range(1, top_ref.shape[0]):
        sums = sums.plus(of_range(n))
    out, lse = sums.result()
    row = rows_of_tile(i, len(out))
    head, position, real = h * groups + row // queries, row % queries, row < groups * queries
    column = jax.lax.broadcasted_iota(jnp.int32, (1, out.shape[1]), 1)
    plt.store(out_ref.at[b, position, head, column], out.astype(out_ref.dtype), mask=real)
    plt.store(lse_ref.at[b, head, position], lse, mask=real)


def rows_of_tile(i, size: int) -> Int[Array, "n 1"]:
    """Numbers of the i-th tile's queries among those of a KV head, of one query head after another."""
    return i * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)


def _attention(q_ref, k_ref, v_ref, ends_ref, *rest, each, queries):
    """The online softmax of one tile of queries over one range of slots, `each` tiles or up to the end."""
    *mask_ref, top_ref, total_ref, sum_ref = rest
    n, b, h, i = (pl.program_id(axis) for axis in range(4))
    q = q_ref[0, 0]
    position = rows_of_tile(i, len(q)) % queries

    def add(j, sums):
        return dense_tile(sums, q, b, h, j, k_ref, v_ref, ends_ref, mask_ref, position)

    last = jnp.minimum((n + 1) * each, pl.cdiv(ends_ref[b, h], TILE))
    sums = jax.lax.fori_loop(n * each, last, add, OnlineSoftmax.empty(q.shape))
    for ref, value in zip((top_ref, total_ref, sum_ref), sums, strict=True):
        ref[0, 0, 0] = value


def dense_tile(sums: OnlineSoftmax, q, b, h, j, k_ref, v_ref, ends_ref, mask_ref, position) -> OnlineSoftmax:
    """The sums of a tile of queries with tile j of KV head h's slots; arguments as of `_visible`."""
    # Slots that no row may attend to may be NaN: they are not loaded, and are 0 instead.
    visible = _visible(b, h, j, ends_ref, mask_ref, position)
    load = lambda ref: _pairs(ref, b, h, j, visible)
    return sums.add(scores(q, load(k_ref)), visible, load(v_ref))


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b k s"]:
    """As `xla.received`; each program walks over the queries with its 64 keys.

    Raises:
      NotImplementedError: as `attention`.
    """
    check_supported(WIDTHS, k, mask, lengths, q=q)
    batch, slots, kv_heads, head = k.shape
    ends, visible = extent(k, mask, lengths)
    grouped, weight = by_kv_head(q, kv_heads), weight_column(weight, q.shape[2] // kv_heads)
    query_tile, filled = _padding(grouped.shape[2])
    operands = [filled(grouped), filled(lse_column(lse, kv_heads)), filled(weight)]
    count, tiles = operands[0].shape[2], pl.cdiv(slots, TILE)
    others = [k, ends] + ([] if visible is None else [visible.astype(jnp.int8)])
    specs = [
        # All queries of kv head h, and their log-sum-exp as a column.
        pl.BlockSpec((1, 1, count, head), lambda b, h, j: (b, h, 0, 0)),
        pl.BlockSpec((1, 1, count, 1), lambda b, h, j: (b, h, 0, 0)),
        # Their weights as a column, which all kv heads share.
        pl.BlockSpec((1, 1, count, 1), lambda b, h, j: (b, 0, 0, 0)),
    ]
    sums = pl.pallas_call(
        functools.partial(_received, query_tile=query_tile),
        grid=(batch, kv_heads, tiles),
        in_specs=[*specs, *[WHOLE] * len(others)],
        # What the keys of the j-th tile of slots received.
        out_specs=pl.BlockSpec((1, 1, TILE), lambda b, h, j: (b, h, j)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, tiles * TILE), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="received",
    )(*operands, *others)
    return sums[..., :slots]


def _received(q_ref, lse_ref, weight_ref, k_ref, ends_ref, *rest, query_tile):
    """Sums the attention that the keys of one tile receive, over all tiles of queries."""
    *mask_ref, out_ref = rest
    b, h, j = (pl.program_id(axis) for axis in range(3))
    k, visible = _keys(b, h, j, k_ref, ends_ref, mask_ref)

    def add(i, total):
        here = pl.ds(i * query_tile, query_tile)
        # Queries of weight 0 may be NaN: their attention weights become 0 before they are multiplied.
        weight = weight_ref[0, 0, here, :]
        visible_and_sent = visible & (weight != 0)
        sent = weights(scores(q_ref[0, 0, here, :], k), lse_ref[0, 0, here, :], visible_and_sent)
        return total + jnp.sum(sent * weight, axis=0)

    zeros = jnp.zeros((TILE,), jnp.float32)
    out_ref[0, 0] = jax.lax.fori_loop(0, q_ref.shape[2] // query_tile, add, zeros)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b q s"]:
    """As `xla.head_mean`; each program walks over the heads for its positions and 64 slots.

    Raises:
      NotImplementedError: as `attention`.
    """
    check_supported(WIDTHS, k, mask, lengths, q=q)
    batch, slots, kv_heads, head = k.shape
    queries, heads = q.shape[1:3]
    ends, visible = extent(k, mask, lengths)
    query_tile, filled = _padding(queries)
    operands = [filled(jnp.swapaxes(q, 1, 2)), filled(lse[..., None])]
    count, tiles = operands[0].shape[2], pl.cdiv(slots, TILE)
    # Queries of the i-th tile of positions, of all heads, and their log-sum-exp as a column.
    of_queries = lambda width: pl.BlockSpec((1, heads, query_tile, width), lambda b, i, j: (b, 0, i, 0))
    others = [k, ends] + ([] if visible is None else [visible.astype(jnp.int8)])
    means = pl.pallas_call(
        functools.partial(_head_mean, kv_heads=kv_heads),
        grid=(batch, count // query_tile, tiles),
        in_specs=[of_queries(head), of_queries(1), *[WHOLE] * len(others)],
        # Mean weights of the i-th tile of positions and the j-th of slots.
        out_specs=pl.BlockSpec((1, query_tile, TILE), lambda b, i, j: (b, i, j)),
        out_shape=jax.ShapeDtypeStruct((batch, count, tiles * TILE), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="head_mean",
    )(*operands, *others)
    return means[:, :queries, :slots]


def _head_mean(q_ref, lse_ref, k_ref, ends_ref, *rest, kv_heads):
    """The mean weights of one tile of positions and slots, summed over the query heads of each KV head."""
    *mask_ref, out_ref = rest
    b, j = pl.program_id(0), pl.program_id(2)
    groups = q_ref.shape[1] // kv_heads

    def add(h, total):
        k, visible = _keys(b, h, j, k_ref, ends_ref, mask_ref)
        for head in (h * groups + group for group in range(groups)):
            total += weights(scores(q_ref[0, head], k), lse_ref[0, head], visible)
        return total

    zeros = jnp.zeros(out_ref.shape[1:], jnp.float32)
    out_ref[0] = jax.lax.fori_loop(0, kv_heads, add, zeros) / q_ref.shape[1]


def _visible(b, h, j, ends_ref, mask_ref, position):
    """Marks the slots of tile j that rows of KV head h may attend to, [n t] or [1 t].

    `mask_ref` is a list of one reference, or empty where there is no mask; `position` are the query positions
    of the rows, [n 1].
    """
    slots = j * TILE + jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
    visible = slots < ends_ref[b, h]
    for ref in mask_ref:
        line = h * int(ref.shape[1] > 1)  # one mask for all kv heads, or one for each
        row = position if ref.shape[2] > 1 else 0
        asked = jnp.broadcast_to(visible, jnp.broadcast_shapes(jnp.shape(row), visible.shape))
        visible = asked & (plt.load(ref.at[b, line, row, slots], mask=asked, other=0) != 0)
    return visible


def _keys(b, h, j, k_ref, ends_ref, mask_ref):
    """Keys of tile j, 0 where invisible, and which slots are visible, [1 t]."""
    visible = _visible(b, h, j, ends_ref, mask_ref, 0)
    return _pairs(k_ref, b, h, j, visible), visible


def _pairs(ref, b, h, j, visible):
    """Keys or values of tile j, [t d], 0 where no row may attend to them."""
    several = len(visible) > 1
    wanted = jnp.max(visible.astype(jnp.int32), axis=0) != 0 if several else visible.reshape(TILE)
    return plt.load(ref.at[b, pl.ds(j * TILE, TILE), h, :], mask=wanted[:, None], other=0.0)


def _padding(queries: int):
    """Queries of a tile, and what fills arrays [b k n d] up to whole tiles with zeros."""
    tile = min(MOST_QUERIES, max(LEAST_QUERIES, pl.next_power_of_2(queries)))
    return tile, lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, -queries % tile), (0, 0)))
