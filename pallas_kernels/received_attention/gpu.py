"""`received` and `head_mean` for NVIDIA GPUs (Pallas, Triton): one program per tile of the result.

Never run on a GPU yet, only interpreted, and lowered for CUDA; Pallas' Triton backend is deprecated since
jax 0.11, and Mosaic GPU, which replaces it, wants another kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped import KeyMask, by_kv_head, check_shapes, check_supported, extent, scores
from pallas_kernels.received_attention.reference import column, of_rows, weights

TILE = 64  # slots
LEAST_ROWS, MOST_ROWS = 16, 64  # 16 is what tensor cores take at least
WIDTHS = (16, 32, 64, 128)


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b k s"]:
    """As the reference; each program walks over the rows with its 64 keys.

    Raises:
      NotImplementedError: heads not 16, 32, 64 or 128 wide, no slots, no rows, or other dtypes than
        float32 and bfloat16, or two of them.
    """
    check_shapes(q, k, mask, lengths)
    check_supported(WIDTHS, k, q=q)
    batch, slots, kv_heads, head = k.shape
    ends, allowed = extent(k, mask, lengths)
    rows = by_kv_head(q, kv_heads)
    row_tile, filled = _padding(rows.shape[2])
    operands = [filled(rows), filled(column(lse, kv_heads)), filled(of_rows(weight, q.shape[2] // kv_heads))]
    count = operands[0].shape[2]
    own = lambda width: pl.BlockSpec((1, 1, count, width), lambda b, h, j: (b, h, 0, 0))
    others = [k, ends] + ([] if allowed is None else [allowed[:, :, 0]])
    tiles = pl.cdiv(slots, TILE)
    found = pl.pallas_call(
        functools.partial(_received, row_tile=row_tile),
        grid=(batch, kv_heads, tiles),
        in_specs=[
            own(head),
            own(1),
            pl.BlockSpec((1, 1, count, 1), lambda b, h, j: (b, 0, 0, 0)),
            *[pl.BlockSpec()] * len(others),
        ],
        out_specs=pl.BlockSpec((1, 1, TILE), lambda b, h, j: (b, h, j)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, tiles * TILE), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="received",
    )(*operands, *others)
    return found[..., :slots]


def _received(q_ref, lse_ref, weight_ref, k_ref, ends_ref, *rest, row_tile):
    *mask_ref, out_ref = rest
    b, h, j = (pl.program_id(axis) for axis in range(3))
    k, seen = _keys(b, h, j, k_ref, ends_ref, mask_ref)

    def add(i, total):
        here = pl.ds(i * row_tile, row_tile)
        weight = weight_ref[0, 0, here, :]
        sent = weights(scores(q_ref[0, 0, here, :], k), lse_ref[0, 0, here, :], seen[None] & (weight != 0))
        return total + jnp.sum(sent * weight, axis=0)

    out_ref[0, 0] = jax.lax.fori_loop(0, q_ref.shape[2] // row_tile, add, jnp.zeros((TILE,), jnp.float32))


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> Float[Array, "b q s"]:
    """As the reference; each program walks over the heads for its rows and 64 keys.

    Raises:
      NotImplementedError: as `received`.
    """
    check_shapes(q, k, mask, lengths)
    check_supported(WIDTHS, k, q=q)
    batch, slots, kv_heads, head = k.shape
    rows, heads = q.shape[1:3]
    ends, allowed = extent(k, mask, lengths)
    row_tile, filled = _padding(rows)
    heads_first = filled(jnp.swapaxes(q, 1, 2)), filled(lse[..., None])
    count, tiles = heads_first[0].shape[2], pl.cdiv(slots, TILE)
    of_rows = lambda width: pl.BlockSpec((1, heads, row_tile, width), lambda b, i, j: (b, 0, i, 0))
    others = [k, ends] + ([] if allowed is None else [allowed[:, :, 0]])
    found = pl.pallas_call(
        functools.partial(_head_mean, kv_heads=kv_heads),
        grid=(batch, count // row_tile, tiles),
        in_specs=[of_rows(head), of_rows(1), *[pl.BlockSpec()] * len(others)],
        out_specs=pl.BlockSpec((1, row_tile, TILE), lambda b, i, j: (b, i, j)),
        out_shape=jax.ShapeDtypeStruct((batch, count, tiles * TILE), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="head_mean",
    )(*heads_first, *others)
    return found[:, :rows, :slots]


def _head_mean(q_ref, lse_ref, k_ref, ends_ref, *rest, kv_heads):
    *mask_ref, out_ref = rest
    b, j = pl.program_id(0), pl.program_id(2)
    heads = q_ref.shape[1]

    def add(h, total):
        k, seen = _keys(b, h, j, k_ref, ends_ref, mask_ref)
        for group in range(heads // kv_heads):
            head = h * (heads // kv_heads) + group
            total += weights(scores(q_ref[0, head], k), lse_ref[0, head], seen[None])
        return total

    zeros = jnp.zeros(out_ref.shape[1:], jnp.float32)
    out_ref[0] = jax.lax.fori_loop(0, kv_heads, add, zeros) / heads


def _keys(b, h, j, k_ref, ends_ref, mask_ref):
    """Keys of tile j, 0 where they may not be read, and which may; `mask_ref` holds one or none."""
    here = pl.ds(j * TILE, TILE)
    seen = j * TILE + jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0) < ends_ref[b, h]
    for ref in mask_ref:
        allowed = plt.load(ref.at[b, h * int(ref.shape[1] > 1), here], mask=seen, other=0)
        seen = seen & (allowed != 0)
    return plt.load(k_ref.at[b, here, h, :], mask=seen[:, None], other=0.0), seen


def _padding(rows: int):
    """Rows of a tile, and what fills arrays [b k r d] up with rows of zeros."""
    tile = min(MOST_ROWS, max(LEAST_ROWS, pl.next_power_of_2(rows)))
    return tile, lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, -rows % tile), (0, 0)))
