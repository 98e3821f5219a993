"""`ragged_attention` for NVIDIA GPUs (Pallas, Mosaic GPU), by the kernel for attention."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.mosaic_gpu import Runs, attend
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
      NotImplementedError: As `pallas_kernels.attention.mosaic_gpu.attention`.
    """
    check_shapes(q, k, v, kept_k, kept_v, start, length, mask, readable, chunk=chunk, widest=widest)
    runs = Runs(kept_k, kept_v, start, length, readable, chunk)
    return attend(q, k, v, mask, None, runs, interpret)[0]
