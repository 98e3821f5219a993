"""`topk_evict` for NVIDIA GPUs (Pallas, Mosaic GPU): a warpgroup per head, scores in shared memory.

Right in Mosaic GPU's interpreter and compiled for a described H100 and B200 with jax 0.12; never run on a
GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.mosaic_gpu import interpreted, named
from pallas_kernels.topk_evict import xla

MOST = 2**15  # positions: 128 KiB of shared memory
LANES = 128
ROWS = 32  # of `LANES` scores that are in registers at once


def topk_evict(
    score: Float[Array, "b k l"], count: Int[Array, "b k"], width: int, interpret: bool = False
) -> Int[Array, "b k {width}"]:
    """As the reference; the listing of what is kept is left to XLA.

    Raises:
      NotImplementedError: more than 32 768 positions, or as `pallas_kernels.mosaic_gpu.interpreted`.
    """
    if score.shape[2] > MOST:
        raise NotImplementedError(f"{score.shape[2]} positions: at most {MOST}")
    return xla.topk_evict(score, count, width, functools.partial(_best, interpret=interpreted(interpret)))


def _best(score: Float[Array, "n l"], count: Int[Array, "n 1"], interpret: object) -> Bool[Array, "n l"]:
    heads, length = score.shape
    part = min(ROWS, pl.next_power_of_2(pl.cdiv(length, LANES)))
    rows = pl.cdiv(length, part * LANES) * part
    padded = jnp.pad(score, ((0, 0), (0, rows * LANES - length)), constant_values=-jnp.inf)
    keep = plgpu.kernel(
        named("topk_evict", _kernel, part=part),
        out_type=jax.ShapeDtypeStruct((heads, rows, LANES), jnp.int32),
        grid=(heads,),
        grid_names=("head",),
        scratch_types=(plgpu.SMEM((rows, LANES), jnp.float32), plgpu.Barrier()),
        interpret=interpret,
    )(padded.reshape(heads, rows, LANES), count[:, 0])
    return keep.reshape(heads, -1)[:, :length] != 0


def _kernel(score_ref, count_ref, keep_ref, scores, loaded, *, part):
    """Marks what `xla.bisected` keeps of one head; it looks at `part` rows of scores at a time."""
    head, count = jax.lax.axis_index("head"), count_ref[jax.lax.axis_index("head")]
    plgpu.copy_gmem_to_smem(score_ref.at[head], scores, loaded)
    plgpu.barrier_wait(loaded)
    size, parts = (part, LANES), scores.shape[0] // part
    layout = plgpu.Layout.WG_STRIDED(size, vec_size=min(4, part))
    index = lambda axis: plgpu.broadcasted_iota(jnp.int32, size, axis, layout=layout)

    def keys(j):
        values = scores[pl.ds(j * part, part)]
        return xla.ordered(jnp.where(values > -jnp.inf, values, -jnp.inf))

    def position(j):
        return (j * part + index(0)) * LANES + index(1)

    def total(marked):
        add = lambda j, sums: sums + marked(j).astype(jnp.int32)
        return jnp.sum(jax.lax.fori_loop(0, parts, add, jnp.zeros(size, jnp.int32)))

    def value_bit(i, threshold):
        higher = threshold ^ jax.lax.shift_left(jnp.int32(1), 31 - i)
        return jnp.where(total(lambda j: keys(j) >= higher) >= count, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, value_bit, jnp.int32(xla.SIGN))
    missing = count - total(lambda j: keys(j) > threshold)
    bits = (scores.shape[0] * LANES).bit_length()

    def position_bit(i, end):
        further = end + jax.lax.shift_left(jnp.int32(1), bits - 1 - i)
        ties = total(lambda j: (keys(j) == threshold) & (position(j) < further))
        return jnp.where(ties <= missing, further, end)

    end = jax.lax.fori_loop(0, bits, position_bit, jnp.int32(0))

    @pl.loop(0, parts)
    def _(j):
        values, key = scores[pl.ds(j * part, part)], keys(j)
        chosen = (key > threshold) | ((key == threshold) & (position(j) < end))
        keep_ref[head, pl.ds(j * part, part)] = (chosen & (values > -jnp.inf)).astype(jnp.int32)
