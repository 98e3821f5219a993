"""The pairs that an eviction keeps, copied after one another."""

from jaxtyping import Array, Float, Int

from pallas_kernels.choice import Implementation, Operation, imported
from pallas_kernels.sparse_gather import xla
from pallas_kernels.sparse_gather.xla import check_shapes

__all__ = ["OPERATION", "sparse_gather"]

OPERATION = Operation(
    name="sparse_gather",
    xla=xla.sparse_gather,
    check=check_shapes,
    operands=("bskd", "bskd", "bkw"),
    results=("bwkd", "bwkd"),
    counted="s",
    kernels={
        "tpu": imported("pallas_kernels.sparse_gather.tpu", "sparse_gather"),
        "triton": imported("pallas_kernels.sparse_gather.triton", "sparse_gather"),
        "mosaic_gpu": imported("pallas_kernels.sparse_gather.mosaic_gpu", "sparse_gather"),
    },
)


def sparse_gather(
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    index: Int[Array, "b #k w"],
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "b w k d"], Float[Array, "b w k d"]]:
    """The pairs that each KV head keeps, as `pallas_kernels.sparse_gather.xla.sparse_gather` defines them.

    Args:
      k: keys.
      v: values, in the same dtype.
      index: slot of each copy, by KV head or one list for all of them; s where there is none, which writes
        zeros.
      implementation: Implementation to use, or None for the default (`pallas_kernels.choice`).

    Raises:
      ValueError: shapes that do not go together, or another implementation.
    """
    return OPERATION.run((k, v, index), {}, implementation)
