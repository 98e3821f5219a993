"""`received` and `head_mean` for TPUs (Pallas, Mosaic): a tile of weights at a time, summed in VMEM."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped import KeyMask, by_kv_head, check_shapes, check_supported, extent, scores
from pallas_kernels.received_attention.reference import column, of_rows, weights

LANES, SUBLANES = 128, 16  # 16 rows are one bfloat16 tile, two float32 tiles
MOST_ROWS, MOST_SLOTS = 512, 512  # of a tile
WIDTHS = range(8, 257, 8)
VMEM_BYTES = 48 * 2**20


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b k s"]:
    """As the reference; K is read once and wanted heads first, see `row_attention`.

    Raises:
      NotImplementedError: heads wider than 256 or no multiple of 8, no slots, no rows, or other
        dtypes than float32 and bfloat16, or two of them.
    """
    check_shapes(q, k, mask, lengths)
    check_supported(WIDTHS, k, q=q)
    batch, slots, kv_heads, head = k.shape
    ends, allowed = extent(k, mask, lengths)
    rows = by_kv_head(q, kv_heads)
    row_tile, tile = _tiles(rows.shape[2], slots)
    weight = jnp.pad(
        of_rows(weight, q.shape[2] // kv_heads), ((0, 0), (0, 0), (0, -rows.shape[2] % row_tile), (0, 0))
    )
    block = lambda shape, place: pl.BlockSpec(shape, lambda b, h, j, i, ends: place(b, h, j, i))
    specs = [
        block((1, 1, row_tile, head), lambda b, h, j, i: (b, h, i, 0)),
        block((1, 1, tile, head), lambda b, h, j, i: (b, h, j, 0)),
        block((1, 1, row_tile, 1), lambda b, h, j, i: (b, h, i, 0)),
        block((1, 1, row_tile, 1), lambda b, h, j, i: (b, 0, i, 0)),
    ]
    operands = [rows, jnp.swapaxes(k, 1, 2), column(lse, kv_heads), weight]
    if allowed is not None:
        own = int(allowed.shape[1] > 1)
        specs.append(block((1, 1, 1, tile), lambda b, h, j, i: (b, h * own, 0, j)))
        operands.append(allowed)
    found = pl.pallas_call(
        functools.partial(_received, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, pl.cdiv(slots, tile), pl.cdiv(rows.shape[2], row_tile)),
            in_specs=specs,
            out_specs=block((1, 1, 1, tile), lambda b, h, j, i: (b, h, 0, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 1, slots), jnp.float32),
        compiler_params=_parameters(),
        interpret=interpret,
        name="received",
    )(ends, *operands)
    return found[:, :, 0]


def _received(ends_ref, q_ref, k_ref, lse_ref, weight_ref, *rest, tile):
    *mask_ref, out_ref = rest
    left = ends_ref[pl.program_id(0), pl.program_id(1)] - pl.program_id(2) * tile

    @pl.when(pl.program_id(3) == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(left > 0)
    def _():
        weight = weight_ref[0, 0]
        seen = _seen(left, mask_ref, tile) & (weight != 0)
        sent = weights(scores(q_ref[0, 0], k_ref[0, 0]), lse_ref[0, 0], seen)
        out_ref[0, 0] += jnp.sum(sent * weight, axis=0, keepdims=True)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b q s"]:
    """As the reference; K is read once per 512 query rows, and wanted heads first, see `row_attention`.

    Raises:
      NotImplementedError: as `received`.
    """
    check_shapes(q, k, mask, lengths)
    check_supported(WIDTHS, k, q=q)
    batch, slots, kv_heads, head = k.shape
    count, groups = q.shape[1], q.shape[2] // kv_heads
    ends, allowed = extent(k, mask, lengths)
    row_tile, tile = _tiles(count, slots, groups)
    of_heads = (1, 1, groups, row_tile)
    block = lambda shape, place: pl.BlockSpec(shape, lambda b, i, j, h, ends: place(b, i, j, h))
    specs = [
        block((*of_heads, head), lambda b, i, j, h: (b, h, 0, i, 0)),
        block((1, 1, tile, head), lambda b, i, j, h: (b, h, j, 0)),
        block((*of_heads, 1), lambda b, i, j, h: (b, h, 0, i, 0)),
    ]
    apart = lambda x: x.reshape(batch, kv_heads, groups, count, -1)
    operands = [apart(by_kv_head(q, kv_heads)), jnp.swapaxes(k, 1, 2), apart(lse)]
    if allowed is not None:
        own = int(allowed.shape[1] > 1)
        specs.append(block((1, 1, 1, tile), lambda b, i, j, h: (b, h * own, 0, j)))
        operands.append(allowed)
    return pl.pallas_call(
        functools.partial(_head_mean, tile=tile, heads=q.shape[2]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(count, row_tile), pl.cdiv(slots, tile), kv_heads),
            in_specs=specs,
            out_specs=block((1, row_tile, tile), lambda b, i, j, h: (b, i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, count, slots), jnp.float32),
        compiler_params=_parameters(),
        interpret=interpret,
        name="head_mean",
    )(ends, *operands)


def _head_mean(ends_ref, q_ref, k_ref, lse_ref, *rest, tile, heads):
    *mask_ref, out_ref = rest
    h = pl.program_id(3)
    left = ends_ref[pl.program_id(0), h] - pl.program_id(2) * tile

    @pl.when(h == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(left > 0)
    def _():
        k, seen = k_ref[0, 0], _seen(left, mask_ref, tile)
        for group in range(q_ref.shape[2]):
            out_ref[0] += weights(scores(q_ref[0, 0, group], k), lse_ref[0, 0, group], seen) / heads


def _seen(left, mask_ref, tile):
    """Which slots of a tile may be read, as a row; `mask_ref` holds one or none."""
    seen = jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1) < left
    return seen & (mask_ref[0][0, 0] != 0) if mask_ref else seen


def _tiles(rows: int, slots: int, groups: int = 1) -> tuple[int, int]:
    """Rows and slots of a tile."""
    most = max(MOST_ROWS // groups // SUBLANES, 1) * SUBLANES
    return min(most, pl.cdiv(rows, SUBLANES) * SUBLANES), min(MOST_SLOTS, pl.cdiv(slots, LANES) * LANES)


def _parameters() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
    )
