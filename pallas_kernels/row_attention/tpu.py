"""`row_attention` for TPUs (Pallas, Mosaic): tiles of slots x the rows of a kv head, the sums in VMEM."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped import KeyMask, by_kv_head, check_shapes, check_supported, extent, scores
from pallas_kernels.row_attention import online
from pallas_kernels.row_attention.reference import RowAttention, shaped

LANES, SUBLANES = 128, 16  # 16 rows are one bfloat16 tile, two float32 tiles
MOST_ROWS, MOST_SLOTS = 512, 512  # of a tile
WIDTHS = range(8, 257, 8)
VMEM_BYTES = 48 * 2**20


def row_attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> RowAttention:
    """As the reference; a kv head's K and V are read once per 512 of its rows, up to its last visible slot.

    K and V are wanted heads first, [b k s d]: a bitcast where XLA lays the cache out so, else a copy.

    Raises:
      NotImplementedError: heads wider than 256 or no multiple of 8, no slots, no rows, or other
        dtypes than float32 and bfloat16, or two of them.
    """
    check_shapes(q, k, mask, lengths)
    check_supported(WIDTHS, k, q=q, v=v)
    batch, slots, kv_heads, head = k.shape
    ends, allowed = extent(k, mask, lengths)
    rows = by_kv_head(q, kv_heads)
    row_tile = min(MOST_ROWS, pl.cdiv(rows.shape[2], SUBLANES) * SUBLANES)
    tile = min(MOST_SLOTS, pl.cdiv(slots, LANES) * LANES)
    of_rows = lambda width: pl.BlockSpec((1, 1, row_tile, width), lambda b, h, i, j, ends: (b, h, i, 0))
    state = jax.eval_shape(functools.partial(online.init, (row_tile, head)))
    out, lse = pl.pallas_call(
        functools.partial(_kernel, tile=tile, masked=allowed is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, pl.cdiv(rows.shape[2], row_tile), pl.cdiv(slots, tile)),
            in_specs=[of_rows(head), *_of_slots(tile, head, allowed)],
            out_specs=[of_rows(head), of_rows(1)],
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype) for x in state],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, q.dtype),
            jax.ShapeDtypeStruct((*rows.shape[:3], 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=interpret,
        name="row_attention",
    )(ends, rows, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), *([] if allowed is None else [allowed]))
    return shaped(q, out, lse)


def _of_slots(tile: int, head: int, allowed: Array | None) -> list[pl.BlockSpec]:
    """K, V and the mask. Beyond the last visible slot the same tile stays: nothing is loaded."""
    last = lambda b, h, j, ends: jnp.minimum(j, jnp.maximum(pl.cdiv(ends[b, h], tile) - 1, 0))
    pairs = pl.BlockSpec((1, 1, tile, head), lambda b, h, i, j, ends: (b, h, last(b, h, j, ends), 0))
    if allowed is None:
        return [pairs, pairs]
    own = int(allowed.shape[1] > 1)
    mask = pl.BlockSpec((1, 1, 1, tile), lambda b, h, i, j, ends: (b, h * own, 0, last(b, h, j, ends)))
    return [pairs, pairs, mask]


def _kernel(ends_ref, q_ref, k_ref, v_ref, *rest, tile, masked):
    (mask_ref,), (out_ref, lse_ref, *running) = (rest[:1], rest[1:]) if masked else ((None,), rest)
    j = pl.program_id(3)
    end = ends_ref[pl.program_id(0), pl.program_id(1)]

    @pl.when(j == 0)
    def _():
        _store(running, online.init(running[-1].shape))

    @pl.when(j * tile < end)
    def _():
        v = v_ref[0, 0]
        seen, readable = _visible(mask_ref, end - j * tile, v.shape)
        v = jnp.where(readable, v, jnp.zeros_like(v))  # 0 * NaN is NaN
        before = online.OnlineSoftmax(*(ref[...] for ref in running))
        _store(running, online.update(before, scores(q_ref[0, 0], k_ref[0, 0]), seen, v))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        out, lse = online.finalize(online.OnlineSoftmax(*(ref[...] for ref in running)))
        out_ref[0, 0] = out.astype(out_ref.dtype)
        lse_ref[0, 0] = lse


def _visible(mask_ref, left, shape):
    """Which slots of a tile may be read: as a row for the scores, and as a column for the values."""
    tile = shape[0]
    seen = jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1) < left
    readable = jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < left
    if mask_ref is None:
        return seen, readable
    seen = seen & (mask_ref[0, 0] != 0)
    column = jnp.broadcast_to(seen.astype(jnp.float32), (LANES, tile)).T[:, :1]
    return seen, column != 0


def _store(refs, values):
    for ref, value in zip(refs, values, strict=True):
        ref[...] = value
