"""`ragged_attention` for NVIDIA GPUs (Pallas, Triton): no run is unpacked, and none waits for a longer one.

A program walks over its tiles of the dense pairs, and then over those of its head's run, which lies in one
piece; its length is read at run time. Where programs are few, both are divided into ranges, which a second
kernel merges (`pallas_kernels.attention.triton`). Compiled for an H100 and right in interpret mode; not
timed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.shared import OnlineSoftmax, check_supported, extent, scores
from pallas_kernels.attention.triton import (
    MASKED_QUERIES,
    TILE,
    WHOLE,
    WIDTHS,
    Queries,
    dense_tile,
    finish,
    rows_of_tile,
)
from pallas_kernels.ragged_attention.xla import check_shapes


def ragged_attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    kept_k: Float[Array, "b s d"],
    kept_v: Float[Array, "b s d"],
    start: Int[Array, "b k"],
    length: Int[Array, "b k"],
    mask: Bool[Array, "#b #k #q t"] | None = None,
    readable: Bool[Array, "b s"] | None = None,
    *,
    chunk: int,
    widest: int,
    interpret: bool = False,
) -> Float[Array, "b q h d"]:
    """As `xla.ragged_attention`; `chunk` is the size of a run that programs are divided for.

    Raises:
      NotImplementedError: As `pallas_kernels.attention.triton.attention`.
    """
    check_shapes(q, k, v, kept_k, kept_v, start, length, mask, readable, chunk=chunk, widest=widest)
    check_supported(WIDTHS, k, mask, None, MASKED_QUERIES, q=q, v=v, kept_k=kept_k, kept_v=kept_v)
    ends, visible = extent(k, mask, None)
    queries = Queries.of(q, k.shape[2])
    tiles = pl.cdiv(k.shape[1], TILE), pl.cdiv(chunk, TILE)
    ranges = queries.ranges(max(tiles))
    masks = [x.astype(jnp.int8) for x in (visible, readable) if x is not None]
    kernel = functools.partial(
        _kernel,
        dense=pl.cdiv(tiles[0], ranges),
        ranges=ranges,
        queries=q.shape[1],
        masked=(visible is not None, readable is not None),
    )
    runs = [x.astype(jnp.int32) for x in (start, length)]
    operands = [queries.grouped, k, v, ends, kept_k, kept_v, *runs, *masks]
    parts = pl.pallas_call(
        kernel,
        grid=(ranges, *queries.grid),
        in_specs=[queries.spec, *[WHOLE] * (len(operands) - 1)],
        out_specs=queries.part_specs,
        out_shape=queries.parts(ranges),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="ragged_attention",
    )(*operands)
    return finish(OnlineSoftmax(*parts), q, queries, interpret)[0]


def _kernel(q_ref, k_ref, v_ref, ends_ref, kept_k_ref, kept_v_ref, start_ref, length_ref, *rest, **static):
    """The online softmax of one tile of queries over one range of the dense pairs and of the head's run."""
    dense, ranges, queries, masked = (static[name] for name in ("dense", "ranges", "queries", "masked"))
    *masks, top_ref, total_ref, sum_ref = rest
    mask_ref, readable_ref = masks[: masked[0]], masks[masked[0] :]
    n, b, h, i = (pl.program_id(axis) for axis in range(4))
    q = q_ref[0, 0]
    position = rows_of_tile(i, len(q)) % queries

    def add_dense(j, sums):
        return dense_tile(sums, q, b, h, j, k_ref, v_ref, ends_ref, mask_ref, position)

    def add_kept(j, sums):
        place = j * TILE + jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
        visible = place < length_ref[b, h]
        for ref in readable_ref:
            visible &= plt.load(ref.at[b, start_ref[b, h] + place], mask=visible, other=0) != 0
        wanted, here = visible.reshape(TILE)[:, None], pl.ds(start_ref[b, h] + j * TILE, TILE)
        load = lambda ref: plt.load(ref.at[b, here, :], mask=wanted, other=0.0)
        return sums.add(scores(q, load(kept_k_ref)), visible, load(kept_v_ref))

    sums = OnlineSoftmax.empty(q.shape)
    last = jnp.minimum((n + 1) * dense, pl.cdiv(ends_ref[b, h], TILE))
    sums = jax.lax.fori_loop(n * dense, last, add_dense, sums)
    tiles = pl.cdiv(length_ref[b, h], TILE)
    each = pl.cdiv(tiles, ranges)
    sums = jax.lax.fori_loop(n * each, jnp.minimum((n + 1) * each, tiles), add_kept, sums)
    for ref, value in zip((top_ref, total_ref, sum_ref), sums, strict=True):
        ref[0, 0, 0] = value
