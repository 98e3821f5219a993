"""`attention`, `received` and `head_mean` for TPUs (Pallas, Mosaic).

Each walks over tiles of scores, a tile of queries times a tile of slots, and sums them up in VMEM along the
last axis of its grid, which runs in order; the other axes are independent of one another:

| kernel | grid | summed over |
|---|---|---|
| `attention` | sequence, KV head, query tile, slot tile | slot tiles: the online softmax |
| `received` | sequence, KV head, slot tile, query tile | query tiles: what arrives at the keys of a tile |
| `head_mean` | sequence, query tile, slot tile, KV head | KV heads: the mean weight |

Keys and values are wanted heads first, [b k s d], so that a tile of a head is contiguous: a bitcast where XLA
lays the cache out so, else a copy. The number of slots up to the last visible one, `ends` [b k], is
prefetched as scalars, since it decides which tiles are loaded; `attention` loads no tile without a visible
slot, wherever it lies. Tiles that jut out over the end of an array hold anything there: slots beyond `ends`
are invisible, and queries do not influence one another.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

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

LANES, SUBLANES = 128, 16  # of a tile in VMEM: 16 x 128 numbers are one bfloat16 tile, two float32 tiles
MOST_QUERIES, MOST_SLOTS = 512, 512  # of a tile of scores
WIDTHS = range(8, 257, 8)
VMEM_BYTES = 48 * 2**20


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """As `xla.attention`; a KV head's K and V are read once per 512 queries, without tiles that nobody sees.

    Raises:
      NotImplementedError: heads wider than 256 or no multiple of 8, no slots, no queries, a mask that differs
        between query positions, or other dtypes than float32 and bfloat16, or two of them.
    """
    check_supported(WIDTHS, k, mask, lengths, q=q, v=v)
    batch, slots, kv_heads, head = k.shape
    ends, visible = extent(k, mask, lengths)
    grouped = by_kv_head(q, kv_heads)
    query_tile, tile = _tiles(grouped.shape[2], slots)
    tiles = pl.cdiv(slots, tile)
    each = int(lengths is not None or (visible is not None and visible.shape[1] > 1))  # head sees its own
    # In one line, as scalars would fill 128 words for each head.
    loaded = loaded_tiles(ends if each else ends[:, :1], visible, tile, tiles).reshape(-1)
    at = lambda b, h, j: (b * (kv_heads if each else 1) + h * each) * tiles + j

    # Queries, their attention and its log-sum-exp: the i-th tile of kv head h, for all slot tiles j.
    of_queries = lambda width: pl.BlockSpec((1, 1, query_tile, width), lambda b, h, i, j, *_: (b, h, i, 0))
    # Keys and values: the j-th tile of slots of kv head h.
    pairs = pl.BlockSpec((1, 1, tile, head), lambda b, h, i, j, _, loaded: (b, h, loaded[at(b, h, j)], 0))
    specs = [of_queries(head), pairs, pairs]
    operands = [grouped, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)]
    if visible is not None:
        # Which of these slots are visible, as a line of lanes; one line for all kv heads, or one for each.
        stride = int(visible.shape[1] > 1)
        line = lambda b, h, i, j, _, loaded: (b, h * stride, 0, loaded[at(b, h, j)])
        specs.append(pl.BlockSpec((1, 1, 1, tile), line))
        operands.append(visible.astype(jnp.int32))
    sums = jax.eval_shape(functools.partial(OnlineSoftmax.empty, (query_tile, head)))
    out, lse = pl.pallas_call(
        functools.partial(_attention, tile=tile, at=at),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, pl.cdiv(grouped.shape[2], query_tile), tiles),
            in_specs=specs,
            out_specs=[of_queries(head), of_queries(1)],
            # The online softmax of one query tile, kept in VMEM from its first slot tile to its last.
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in sums],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(grouped.shape, q.dtype),
            jax.ShapeDtypeStruct((*grouped.shape[:3], 1), jnp.float32),
        ],
        compiler_params=_parameters(),
        interpret=interpret,
        name="attention",
    )(ends, loaded, *operands)
    return by_position(out, lse, q)


def loaded_tiles(
    ends: Int[Array, "b #k"], visible: Bool[Array, "b #k 1 s"] | None, tile: int, tiles: int
) -> Int[Array, "b #k {tiles}"]:
    """The slot tile that lies in VMEM at each step over slot tiles.

    A tile with a visible slot is loaded at its own step, for which it is its own number. At the other steps
    the one before stays, or the first one is awaited, and nothing is loaded. Of a head that sees nothing the
    first tile is loaded.
    """
    number = jnp.arange(tiles, dtype=jnp.int32)
    seen = number * tile < ends[..., None]
    if visible is not None:
        batch, heads, _, slots = visible.shape
        padded = jnp.pad(visible[:, :, 0], ((0, 0), (0, 0), (0, tiles * tile - slots)))
        seen &= jnp.any(padded.reshape(batch, heads, tiles, tile), axis=3)
    latest = jax.lax.cummax(jnp.where(seen, number, -1), axis=2)
    first = jnp.argmax(seen, axis=2).astype(jnp.int32)[..., None]
    return jnp.where(latest < 0, first, latest)


def _attention(ends_ref, loaded_ref, q_ref, k_ref, v_ref, *rest, tile, at):
    """One tile of scores: its weights and weighted values go into the online softmax of the query tile."""
    *mask_ref, out_ref, lse_ref, top_ref, total_ref, sum_ref = rest
    sums = top_ref, total_ref, sum_ref
    b, h, j = pl.program_id(0), pl.program_id(1), pl.program_id(3)
    left = ends_ref[b, h] - j * tile  # slots that this tile has before the end

    @pl.when(j == 0)
    def _():
        _store(sums, OnlineSoftmax.empty(sum_ref.shape))

    @pl.when((loaded_ref[at(b, h, j)] == j) & (left > 0))
    def _():
        # Values of invisible slots may be NaN, and 0 * NaN is NaN: they become 0 before the product.
        v, visible = v_ref[0, 0], _visible(left, mask_ref, tile)
        v = jnp.where(_as_column(left, visible, mask_ref, tile), v, jnp.zeros_like(v))
        before = OnlineSoftmax(*(ref[...] for ref in sums))
        _store(sums, before.add(scores(q_ref[0, 0], k_ref[0, 0]), visible, v))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        out, lse = OnlineSoftmax(*(ref[...] for ref in sums)).result()
        out_ref[0, 0] = out.astype(out_ref.dtype)
        lse_ref[0, 0] = lse


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b k s"]:
    """As `xla.received`; the keys are read once, the queries once per 512 slots.

    Raises:
      NotImplementedError: as `attention`.
    """
    check_supported(WIDTHS, k, mask, lengths, q=q)
    batch, slots, kv_heads, head = k.shape
    ends, visible = extent(k, mask, lengths)
    grouped = by_kv_head(q, kv_heads)
    query_tile, tile = _tiles(grouped.shape[2], slots)
    # The last tile of queries is filled up with weight 0.
    missing = -grouped.shape[2] % query_tile
    weight = weight_column(weight, q.shape[2] // kv_heads)
    weight = jnp.pad(weight, ((0, 0), (0, 0), (0, missing), (0, 0)))

    block = lambda shape, place: pl.BlockSpec(shape, lambda b, h, j, i, ends: place(b, h, j, i))
    specs = [
        # Queries: the i-th tile of kv head h.
        block((1, 1, query_tile, head), lambda b, h, j, i: (b, h, i, 0)),
        # Keys: the j-th tile of slots of kv head h, for all query tiles i.
        block((1, 1, tile, head), lambda b, h, j, i: (b, h, j, 0)),
        # Log-sum-exp of these queries, as a column.
        block((1, 1, query_tile, 1), lambda b, h, j, i: (b, h, i, 0)),
        # Weights of these queries, as a column; all kv heads share them.
        block((1, 1, query_tile, 1), lambda b, h, j, i: (b, 0, i, 0)),
    ]
    operands = [grouped, jnp.swapaxes(k, 1, 2), lse_column(lse, kv_heads), weight]
    if visible is not None:
        # Which of these slots are visible, as a line of lanes; one line for all kv heads, or one for each.
        stride = int(visible.shape[1] > 1)
        specs.append(block((1, 1, 1, tile), lambda b, h, j, i: (b, h * stride, 0, j)))
        operands.append(visible.astype(jnp.int32))
    sums = pl.pallas_call(
        functools.partial(_received, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, pl.cdiv(slots, tile), pl.cdiv(grouped.shape[2], query_tile)),
            in_specs=specs,
            # What the keys of the j-th slot tile received, a line of lanes that stays in VMEM for all query
            # tiles i.
            out_specs=block((1, 1, 1, tile), lambda b, h, j, i: (b, h, 0, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 1, slots), jnp.float32),
        compiler_params=_parameters(),
        interpret=interpret,
        name="received",
    )(ends, *operands)
    return sums[:, :, 0]


def _received(ends_ref, q_ref, k_ref, lse_ref, weight_ref, *rest, tile):
    """One tile of scores: the weights of its queries, summed into what its keys receive."""
    *mask_ref, out_ref = rest
    left = ends_ref[pl.program_id(0), pl.program_id(1)] - pl.program_id(2) * tile

    @pl.when(pl.program_id(3) == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(left > 0)
    def _():
        # Queries of weight 0 may be NaN: their attention weights become 0 before they are multiplied.
        weight = weight_ref[0, 0]
        visible = _visible(left, mask_ref, tile) & (weight != 0)
        sent = weights(scores(q_ref[0, 0], k_ref[0, 0]), lse_ref[0, 0], visible)
        out_ref[0, 0] += jnp.sum(sent * weight, axis=0, keepdims=True)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: Mask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b q s"]:
    """As `xla.head_mean`; the keys are read once per 512 queries.

    Raises:
      NotImplementedError: as `attention`.
    """
    check_supported(WIDTHS, k, mask, lengths, q=q)
    batch, slots, kv_heads, head = k.shape
    count, groups = q.shape[1], q.shape[2] // kv_heads
    ends, visible = extent(k, mask, lengths)
    query_tile, tile = _tiles(count, slots, groups)

    block = lambda shape, place: pl.BlockSpec(shape, lambda b, i, j, h, ends: place(b, i, j, h))
    specs = [
        # Queries: the i-th tile of positions, for each of the query heads of kv head h.
        block((1, 1, groups, query_tile, head), lambda b, i, j, h: (b, h, 0, i, 0)),
        # Keys: the j-th tile of slots of kv head h.
        block((1, 1, tile, head), lambda b, i, j, h: (b, h, j, 0)),
        # Log-sum-exp of these queries, a column per query head.
        block((1, 1, groups, query_tile, 1), lambda b, i, j, h: (b, h, 0, i, 0)),
    ]
    apart = lambda x: x.reshape(batch, kv_heads, groups, count, -1)
    operands = [apart(by_kv_head(q, kv_heads)), jnp.swapaxes(k, 1, 2), apart(lse)]
    if visible is not None:
        # Which of these slots are visible, as a line of lanes; one line for all kv heads, or one for each.
        stride = int(visible.shape[1] > 1)
        specs.append(block((1, 1, 1, tile), lambda b, i, j, h: (b, h * stride, 0, j)))
        operands.append(visible.astype(jnp.int32))
    return pl.pallas_call(
        functools.partial(_head_mean, tile=tile, heads=q.shape[2]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(count, query_tile), pl.cdiv(slots, tile), kv_heads),
            in_specs=specs,
            # Mean weights of the i-th tile of positions and the j-th of slots, in VMEM for all kv heads h.
            out_specs=block((1, query_tile, tile), lambda b, i, j, h: (b, i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, count, slots), jnp.float32),
        compiler_params=_parameters(),
        interpret=interpret,
        name="head_mean",
    )(ends, *operands)


def _head_mean(ends_ref, q_ref, k_ref, lse_ref, *rest, tile, heads):
    """The weights of the query heads of one KV head, added to the mean of a tile of positions and slots."""
    *mask_ref, out_ref = rest
    h = pl.program_id(3)
    left = ends_ref[pl.program_id(0), h] - pl.program_id(2) * tile

    @pl.when(h == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(left > 0)
    def _():
        k, visible = k_ref[0, 0], _visible(left, mask_ref, tile)
        for group in range(q_ref.shape[2]):
            out_ref[0] += weights(scores(q_ref[0, 0, group], k), lse_ref[0, 0, group], visible) / heads


def _visible(left, mask_ref, tile):
    """Marks the visible slots of a tile, as a row [1 t]; `left` of them come before the end.

    `mask_ref` is a list of one reference, or empty where there is no mask.
    """
    visible = jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1) < left
    return visible & (mask_ref[0][0, 0] != 0) if mask_ref else visible


def _as_column(left, visible, mask_ref, tile):
    """Converts `_visible` to a column [t 1]; Mosaic transposes no booleans, and whole tiles only."""
    if not mask_ref:
        return jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < left
    return jnp.broadcast_to(visible.astype(jnp.float32), (LANES, tile)).T[:, :1] != 0


def _store(refs, values):
    for ref, value in zip(refs, values, strict=True):
        ref[...] = value


def _tiles(queries: int, slots: int, groups: int = 1) -> tuple[int, int]:
    """Queries (of each of `groups` heads) and slots of a tile of scores."""
    most = max(MOST_QUERIES // groups // SUBLANES, 1) * SUBLANES
    return min(most, pl.cdiv(queries, SUBLANES) * SUBLANES), min(MOST_SLOTS, pl.cdiv(slots, LANES) * LANES)


def _parameters() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
    )
