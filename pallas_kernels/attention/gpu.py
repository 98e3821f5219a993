"""`attention`, `received` and `head_mean` for NVIDIA GPUs (Pallas, Triton).

Programs run in no order and share nothing, so each walks by itself over what it sums up:

| kernel | grid | a program |
|---|---|---|
| `attention` | slot range, sequence, KV head, query tile | walks over its slots; XLA merges the ranges |
| `received` | sequence, KV head, slot tile | walks over the queries with its 64 keys |
| `head_mean` | sequence, query tile, slot tile | walks over the KV heads for its positions and 64 slots |

K and V are read as they are named, which is how they lie in memory where this kernel or cuDNN is chosen
(`dllm_jax.nn.memory`), and only up to the last visible slot. Triton checks no bounds: what a BlockSpec lays
out is filled up to whole tiles, and everything else is loaded under a mask.

Faster than cuDNN for the queries of a block, slower for a thousand (docs/background/performance.md). Pallas'
Triton backend is deprecated since jax 0.11, and Mosaic GPU, which replaces it, wants another kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.shared import (
    OnlineSoftmax,
    by_kv_head,
    by_position,
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
    """As `xla.attention`; the slots are split among programs, and XLA merges their sums (flash decoding).

    Raises:
      NotImplementedError: heads not 16, 32, 64 or 128 wide, no slots, no queries, a mask that differs between
        more than 128 query positions, or other dtypes than float32 and bfloat16, or two of them.
    """
    check_supported(WIDTHS, k, mask, lengths, MASKED_QUERIES, q=q, v=v)
    batch, slots, kv_heads, head = k.shape
    ends, visible = extent(k, mask, lengths)
    grouped = by_kv_head(q, kv_heads)
    count = grouped.shape[2]
    query_tile, filled = _padding(count)
    grouped = filled(grouped)

    # Few queries make few programs: then the slots are split into as many ranges as keep the processors busy.
    query_tiles, tiles = grouped.shape[2] // query_tile, pl.cdiv(slots, TILE)
    each = pl.cdiv(tiles, min(tiles, pl.cdiv(PROGRAMS, batch * kv_heads * query_tiles)))  # tiles of a range
    ranges = pl.cdiv(tiles, each)

    # Queries: the i-th tile of kv head h. The sums over slot range n are laid out alike, behind an axis of
    # ranges.
    of_queries = pl.BlockSpec((1, 1, query_tile, head), lambda n, b, h, i: (b, h, i, 0))
    part = lambda width: pl.BlockSpec((1, 1, 1, query_tile, width), lambda n, b, h, i: (n, b, h, i, 0))
    sums = jax.eval_shape(functools.partial(OnlineSoftmax.empty, grouped.shape))
    others = [k, v, ends] + ([] if visible is None else [visible.astype(jnp.int8)])
    parts = pl.pallas_call(
        functools.partial(_attention, each=each, queries=q.shape[1]),
        grid=(ranges, batch, kv_heads, query_tiles),
        in_specs=[of_queries, *[WHOLE] * len(others)],
        out_specs=[part(x.shape[-1]) for x in sums],
        out_shape=[jax.ShapeDtypeStruct((ranges, *x.shape), x.dtype) for x in sums],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention",
    )(grouped, *others)
    out, lse = OnlineSoftmax(*parts).merged().result()
    out, lse = by_position(out[:, :, :count], lse[:, :, :count], q)
    # Else XLA turns the weights of the output projection around, in every step, to the order of these sums.
    return with_layout_constraint(out, Layout((0, 1, 2, 3))), lse


def _attention(q_ref, k_ref, v_ref, ends_ref, *rest, each, queries):
    """The online softmax of one tile of queries over one range of slots, `each` tiles or up to the end."""
    *mask_ref, top_ref, total_ref, sum_ref = rest
    n, b, h, i = (pl.program_id(axis) for axis in range(4))
    q = q_ref[0, 0]
    # Query positions of the tile's rows, of one query head after another.
    position = (i * len(q) + jax.lax.broadcasted_iota(jnp.int32, (len(q), 1), 0)) % queries

    def add(j, sums):
        visible = _visible(b, h, j, ends_ref, mask_ref, position)
        # Slots that no row may attend to may be NaN: they are not loaded, and are 0 instead.
        load = lambda ref: _pairs(ref, b, h, j, visible)
        return sums.add(scores(q, load(k_ref)), visible, load(v_ref))

    last = jnp.minimum((n + 1) * each, pl.cdiv(ends_ref[b, h], TILE))
    sums = jax.lax.fori_loop(n * each, last, add, OnlineSoftmax.empty(q.shape))
    for ref, value in zip((top_ref, total_ref, sum_ref), sums, strict=True):
        ref[0, 0, 0] = value


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
    found = pl.pallas_call(
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
    return found[..., :slots]


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
    found = pl.pallas_call(
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
    return found[:, :queries, :slots]


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
        own = h * int(ref.shape[1] > 1)  # one mask for all kv heads, or one for each
        row = position if ref.shape[2] > 1 else 0
        asked = jnp.broadcast_to(visible, jnp.broadcast_shapes(jnp.shape(row), visible.shape))
        visible = asked & (plt.load(ref.at[b, own, row, slots], mask=asked, other=0) != 0)
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
