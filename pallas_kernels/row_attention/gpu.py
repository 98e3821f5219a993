"""`row_attention` for NVIDIA GPUs (Pallas, Triton): the slots split among programs, merged by XLA.

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
from pallas_kernels.row_attention import online
from pallas_kernels.row_attention.reference import RowAttention, shaped

TILE = 64  # slots
LEAST_ROWS, MOST_ROWS = 16, 64  # 16 is what tensor cores take at least
WIDTHS = (16, 32, 64, 128)
PROGRAMS = 256  # about two for each processor of an H100


def row_attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    interpret: bool = False,
) -> RowAttention:
    """As the reference; K and V are read where they lie, up to the last visible slot.

    Raises:
      NotImplementedError: heads not 16, 32, 64 or 128 wide, no slots, no rows, or other dtypes than
        float32 and bfloat16, or two of them.
    """
    check_shapes(q, k, mask, lengths)
    check_supported(WIDTHS, k, q=q, v=v)
    batch, slots, kv_heads, head = k.shape
    ends, allowed = extent(k, mask, lengths)
    rows = by_kv_head(q, kv_heads)
    count = rows.shape[2]
    row_tile = min(MOST_ROWS, max(LEAST_ROWS, pl.next_power_of_2(count)))
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -count % row_tile), (0, 0)))
    row_tiles, tiles = rows.shape[2] // row_tile, pl.cdiv(slots, TILE)
    each = pl.cdiv(tiles, min(tiles, pl.cdiv(PROGRAMS, batch * kv_heads * row_tiles)))  # tiles of a program
    splits = pl.cdiv(tiles, each)
    state = jax.eval_shape(functools.partial(online.init, rows.shape))
    part = lambda width: pl.BlockSpec((1, 1, 1, row_tile, width), lambda n, b, h, i: (n, b, h, i, 0))
    operands = [rows, k, v, ends] + ([] if allowed is None else [allowed[:, :, 0]])
    parts = pl.pallas_call(
        functools.partial(_kernel, each=each, masked=allowed is not None),
        grid=(splits, batch, kv_heads, row_tiles),
        in_specs=[pl.BlockSpec((1, 1, row_tile, head), lambda n, b, h, i: (b, h, i, 0))]
        + [pl.BlockSpec()] * (len(operands) - 1),
        out_specs=[part(x.shape[-1]) for x in state],
        out_shape=[jax.ShapeDtypeStruct((splits, *x.shape), x.dtype) for x in state],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="row_attention",
    )(*operands)
    outcome = online.finalize(online.merge(online.OnlineSoftmax(*parts)))
    return shaped(q, *(x[:, :, :count] for x in outcome))


def _kernel(q_ref, k_ref, v_ref, ends_ref, *rest, each, masked):
    (mask_ref,), parts = (rest[:1], rest[1:]) if masked else ((None,), rest)
    n, b, h = (pl.program_id(axis) for axis in range(3))
    end, q = ends_ref[b, h], q_ref[0, 0]

    def add(j, running):
        slots = j * TILE + jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0)
        seen = slots < end
        if mask_ref is not None:
            own = h * int(mask_ref.shape[1] > 1)
            allowed = plt.load(mask_ref.at[b, own, pl.ds(j * TILE, TILE)], mask=seen, other=0)
            seen = seen & (allowed != 0)
        k, v = (
            plt.load(ref.at[b, pl.ds(j * TILE, TILE), h, :], mask=seen[:, None], other=0.0)
            for ref in (k_ref, v_ref)
        )
        return online.update(running, scores(q, k), seen[None], v)

    last = jnp.minimum((n + 1) * each, pl.cdiv(end, TILE))
    running = jax.lax.fori_loop(n * each, last, add, online.init(q.shape))
    for ref, value in zip(parts, running, strict=True):
        ref[0, 0, 0] = value
