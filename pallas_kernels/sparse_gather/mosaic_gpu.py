"""`sparse_gather` for NVIDIA GPUs (Pallas, Mosaic GPU): the copy engine brings 64 slots of a head together.

Right in Mosaic GPU's interpreter and compiled for a described H100 and B200 with jax 0.12; never run on a
GPU.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_gpu import interpreted, named
from pallas_kernels.sparse_gather.xla import check_shapes

TILE = 64  # copies
ALIGNED = 128  # bytes in which copies to shared memory have to begin


def sparse_gather(
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    index: Int[Array, "b #k w"],
    interpret: bool = False,
) -> tuple[Float[Array, "b w k d"], Float[Array, "b w k d"]]:
    """As `xla.sparse_gather`; only the pairs that are kept are read.

    Raises:
      NotImplementedError: Heads that are no multiple of 128 bytes, no copies, other dtypes than float32 and
        bfloat16, or as `pallas_kernels.mosaic_gpu.interpreted`.
    """
    check_shapes(k, v, index)
    batch, slots, kv_heads, head = k.shape
    if k.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"{k.dtype}: float32 or bfloat16")
    if head * k.dtype.itemsize % ALIGNED:
        raise NotImplementedError(f"head width {head} is no multiple of {ALIGNED} bytes")
    width = index.shape[2]
    if not width:
        raise NotImplementedError("no copies")

    # Filled up to whole tiles with s, which copies nothing.
    index = jnp.pad(index, ((0, 0), (0, 0), (0, -width % TILE)), constant_values=slots)
    copies = jax.ShapeDtypeStruct((batch, index.shape[2], kv_heads, head), k.dtype)
    tile = plgpu.SMEM((TILE, head), k.dtype)
    copied = plgpu.kernel(
        named("sparse_gather", _kernel, slots=slots),
        out_type=(copies, copies),
        grid=(batch, kv_heads, index.shape[2] // TILE),
        grid_names=("sequence", "head", "tile"),
        scratch_types=(
            plgpu.SMEM((TILE,), jnp.int32),
            tile,
            tile,
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2 * TILE),
        ),
        interpret=interpreted(interpret),
    )(index.astype(jnp.int32), k, v)
    return copied[0][:, :width], copied[1][:, :width]


def _kernel(index_ref, k_ref, v_ref, out_k_ref, out_v_ref, places, keys, values, listed, arrived, *, slots):
    """Copies 64 slots from wherever they lie, by their indices; zeros where there is none."""
    b, h, j = (jax.lax.axis_index(name) for name in ("sequence", "head", "tile"))
    line = h if index_ref.shape[1] > 1 else 0
    here = pl.ds(j * TILE, TILE)
    plgpu.copy_gmem_to_smem(index_ref.at[b, line, here], places, listed)
    for tile in (keys, values):
        tile[...] = jnp.zeros(tile.shape, tile.dtype)
    plgpu.commit_smem()  # zeros first, copies after them
    plgpu.barrier_wait(listed)

    @pl.loop(0, TILE)
    def _(i):
        @pl.when(places[i] < slots)
        def _():
            for source, tile in ((k_ref, keys), (v_ref, values)):
                plgpu.copy_gmem_to_smem(source.at[b, places[i], h], tile.at[i], arrived)

        @pl.when(places[i] >= slots)
        def _():
            for _ in range(2):
                plgpu.barrier_arrive(arrived)

    plgpu.barrier_wait(arrived)
    for tile, target in ((keys, out_k_ref), (values, out_v_ref)):
        plgpu.copy_smem_to_gmem(tile, target.at[b, here, h])
    plgpu.wait_smem_to_gmem(0)
