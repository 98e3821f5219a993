"""Attention of a few query rows over many slots: the step of a policy that reuses keys and values."""

from jaxtyping import Array, Float, Int

from pallas_kernels.choice import Implementation, Operation, imported
from pallas_kernels.grouped import KeyMask, check_shapes
from pallas_kernels.row_attention import xla
from pallas_kernels.row_attention.reference import RowAttention

__all__ = ["OPERATION", "RowAttention", "row_attention"]

OPERATION = Operation(
    name="row_attention",
    xla=xla.row_attention,
    kernels={
        "tpu": imported("pallas_kernels.row_attention.tpu", "row_attention"),
        "cuda": imported("pallas_kernels.row_attention.gpu", "row_attention"),
    },
)


def row_attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    implementation: Implementation | None = None,
) -> RowAttention:
    """See `pallas_kernels.row_attention.reference.row_attention`, which defines the meaning.

    Args:
      q: queries; head i reads kv head i // (h // k).
      k: keys, in the same dtype.
      v: values, in the same dtype.
      mask: slots that may be attended to, for all kv heads or for each; None means all.
      lengths: each kv head may read its first `lengths` slots; None means all.
      implementation: see `pallas_kernels.choice.Operation.run`.
    """
    check_shapes(q, k, mask, lengths)
    return OPERATION.run((q, k, v, mask, lengths), {}, implementation)
