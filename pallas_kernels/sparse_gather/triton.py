"""`sparse_gather` for NVIDIA GPUs (Pallas, Triton): a program makes 64 copies of a head's keys and values.

Right on an H100 and an H200 with jax 0.11.2 at small shapes (`dllm_jax check --quick`). Pallas' Triton
backend is deprecated since jax 0.11, and Mosaic GPU, which replaces it, wants another kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_gather.xla import check_shapes

TILE = 64  # copies


def sparse_gather(
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    index: Int[Array, "b #k w"],
    interpret: bool = False,
) -> tuple[Float[Array, "b w k d"], Float[Array, "b w k d"]]:
    """As `xla.sparse_gather`; only the pairs that are kept are read.

    Raises:
      NotImplementedError: a head width that is no power of two, no copies, or other dtypes than float32 and
        bfloat16.
    """
    check_shapes(k, v, index)
    batch, slots, kv_heads, head = k.shape
    if k.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"{k.dtype}: float32 or bfloat16")
    if head != pl.next_power_of_2(head):
        raise NotImplementedError(f"head width {head} is no power of two")
    width = index.shape[2]
    if not width:
        raise NotImplementedError("no copies")

    # Filled up to whole tiles with s, which copies nothing.
    index = jnp.pad(index, ((0, 0), (0, 0), (0, -width % TILE)), constant_values=slots)
    copies = jax.ShapeDtypeStruct((batch, index.shape[2], kv_heads, head), k.dtype)
    # The j-th tile of head h: which slots to copy (one list may serve all heads), and where the copies go. K
    # and V are whole; programs load from them.
    per_head = index.shape[1] > 1
    slots_to_copy = pl.BlockSpec((1, 1, TILE), lambda b, h, j: (b, h if per_head else 0, j))
    of_copies = pl.BlockSpec((1, TILE, 1, head), lambda b, h, j: (b, j, h, 0))
    copied = pl.pallas_call(
        functools.partial(_kernel, slots=slots),
        grid=(batch, kv_heads, index.shape[2] // TILE),
        in_specs=[slots_to_copy, pl.BlockSpec(), pl.BlockSpec()],
        out_specs=[of_copies, of_copies],
        out_shape=[copies, copies],
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="sparse_gather",
    )(index.astype(jnp.int32), k, v)
    return copied[0][:, :width], copied[1][:, :width]


def _kernel(index_ref, k_ref, v_ref, *out_refs, slots):
    """Loads 64 slots wherever they lie, by their indices; where there is none, zeros take their place."""
    b, h = pl.program_id(0), pl.program_id(1)
    place = index_ref[0, 0][:, None]
    real = place < slots
    column = jax.lax.broadcasted_iota(jnp.int32, (1, k_ref.shape[3]), 1)
    for source, target in zip((k_ref, v_ref), out_refs, strict=True):
        scattered = source.at[b, jnp.where(real, place, 0), h, column]
        target[0, :, 0, :] = plt.load(scattered, mask=real, other=0.0)
