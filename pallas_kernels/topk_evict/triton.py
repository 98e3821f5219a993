"""`topk_evict` for NVIDIA GPUs (Pallas, Triton): one program per head, whose scores stay in registers.

Right on an H100 and an H200 with jax 0.11.2 at small shapes (`dllm_jax check --quick`). Pallas' Triton
backend is deprecated since jax 0.11.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.topk_evict import xla

MOST = 2**15  # positions: 128 registers of each of 256 threads
WARPS = 8


def topk_evict(
    score: Float[Array, "b k l"], count: Int[Array, "b k"], width: int, interpret: bool = False
) -> Int[Array, "b k {width}"]:
    """As the reference; the listing of what is kept is left to XLA.

    Raises:
      NotImplementedError: more than 32 768 positions.
    """
    if score.shape[2] > MOST:
        raise NotImplementedError(f"{score.shape[2]} positions: at most {MOST}")
    return xla.topk_evict(score, count, width, functools.partial(_best, interpret=interpret))


def _best(score: Float[Array, "n l"], count: Int[Array, "n 1"], interpret: bool) -> Bool[Array, "n l"]:
    heads, length = score.shape
    padding = max(pl.next_power_of_2(length), 32 * WARPS) - length
    padded = jnp.pad(score, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    # All scores of head i, filled up to a power of two with -inf, and how many it keeps.
    of_head = lambda columns: pl.BlockSpec((1, columns), lambda i: (i, 0))
    keep = pl.pallas_call(
        xla.kernel,
        grid=(heads,),
        in_specs=[of_head(padded.shape[1]), of_head(1)],
        out_specs=of_head(padded.shape[1]),
        out_shape=jax.ShapeDtypeStruct(padded.shape, jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=WARPS),
        interpret=interpret,
        name="topk_evict",
    )(padded, count)
    return keep[:, :length] != 0
