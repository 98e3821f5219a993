"""`topk_evict` for TPUs (Pallas, Mosaic): all rounds of the bisection on 8 heads that stay in VMEM."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.topk_evict import xla

LANES, HEADS = 128, 8  # of a tile
MOST_BYTES = 2**22  # of scores held at once; with the mask and what is loaded meanwhile about five times that
VMEM_BYTES = 48 * 2**20


def topk_evict(
    score: Float[Array, "b k l"], count: Int[Array, "b k"], width: int, interpret: bool = False
) -> Int[Array, "b k {width}"]:
    """As the reference; the listing of what is kept is left to XLA.

    Raises:
      NotImplementedError: more than 131 072 positions.
    """
    if HEADS * score.shape[2] * 4 > MOST_BYTES:
        raise NotImplementedError(f"{score.shape[2]} positions: at most {MOST_BYTES // (4 * HEADS)}")
    return xla.topk_evict(score, count, width, functools.partial(_best, interpret=interpret))


def _best(score: Float[Array, "n l"], count: Int[Array, "n 1"], interpret: bool) -> Bool[Array, "n l"]:
    heads, length = score.shape
    padded = jnp.pad(score, ((0, 0), (0, -length % LANES)), constant_values=-jnp.inf)
    # All scores of the i-th 8 heads (sequences apart), filled up to whole tiles with -inf, and how many each
    # keeps.
    wide = pl.BlockSpec((HEADS, padded.shape[1]), lambda i: (i, 0))
    keep = pl.pallas_call(
        xla.kernel,
        grid=(pl.cdiv(heads, HEADS),),
        in_specs=[wide, pl.BlockSpec((HEADS, 1), lambda i: (i, 0))],
        out_specs=wide,
        out_shape=jax.ShapeDtypeStruct(padded.shape, jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="topk_evict",
    )(padded, count)
    return keep[:, :length] != 0
