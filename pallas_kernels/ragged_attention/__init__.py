"""Attention to dense KV pairs and to runs of kept ones, whose lengths differ between heads."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.choice import Implementation, Operation, imported
from pallas_kernels.ragged_attention import xla
from pallas_kernels.ragged_attention.xla import check_shapes, read_runs

__all__ = ["OPERATION", "ragged_attention", "read_runs"]

OPERATION = Operation(
    name="ragged_attention",
    xla=xla.ragged_attention,
    check=check_shapes,
    operands=("bqhd", "btkd", "btkd", "bsd", "bsd", "bk", "bk", "bkqt", "bs"),
    results=("bqhd",),
    kernels={
        "triton": imported("pallas_kernels.ragged_attention.triton", "ragged_attention"),
        "mosaic_gpu": imported("pallas_kernels.ragged_attention.mosaic_gpu", "ragged_attention"),
    },
)


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
    implementation: Implementation | None = None,
) -> Float[Array, "b q h d"]:
    """Attends to dense pairs and to each head's run, as `xla.ragged_attention` defines it.

    Args:
      q: Queries; head i reads KV head i // (h // k).
      k: Dense keys.
      v: Dense values.
      kept_k: Kept keys of all heads, one run after another.
      kept_v: Kept values, stored alike.
      start: First slot of each KV head's run.
      length: Number of slots of each KV head's run.
      mask: True where a query may attend to a dense pair; None means everywhere.
      readable: True where a kept pair may be attended to; None means everywhere.
      chunk: Slots of a run that XLA's form reads at a time.
      widest: Upper bound of `length`.
      implementation: Implementation to use, or None for the default (`pallas_kernels.choice`).

    Raises:
      ValueError: Shapes that do not go together, or another implementation.
    """
    arrays = q, k, v, kept_k, kept_v, start, length, mask, readable
    return OPERATION.run(arrays, dict(chunk=chunk, widest=widest), implementation)
