"""The positions of the best scores of each head: what an eviction keeps."""

from jaxtyping import Array, Float, Int

from pallas_kernels.choice import Implementation, Operation, imported
from pallas_kernels.topk_evict import xla

__all__ = ["OPERATION", "topk_evict"]

OPERATION = Operation(
    name="topk_evict",
    xla=xla.topk_evict,
    check=lambda score, count, width: xla.check_options(score, width),
    operands=("bkl", "bk"),
    results=("bkw",),
    counted="l",
    kernels={
        "tpu": imported("pallas_kernels.topk_evict.tpu", "topk_evict"),
        "triton": imported("pallas_kernels.topk_evict.triton", "topk_evict"),
        "mosaic_gpu": imported("pallas_kernels.topk_evict.mosaic_gpu", "topk_evict"),
    },
)


def topk_evict(
    score: Float[Array, "b k l"],
    count: Int[Array, "b k"],
    width: int,
    implementation: Implementation | None = None,
) -> Int[Array, "b k {width}"]:
    """Positions of the best scores, as `pallas_kernels.topk_evict.xla.reference` defines them.

    Args:
      score: importance of each position for each KV head, float32; larger is kept first, -inf never.
      count: Number of positions that each head retains, at most `width`.
      width: static width of the result.
      implementation: Implementation to use, or None for the default (`pallas_kernels.choice`).

    Raises:
      ValueError: an invalid width, scores that are not float32, or another implementation.
    """
    return OPERATION.run((score, count), dict(width=width), implementation)
