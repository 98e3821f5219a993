"""Attention of a few query rows over many slots: the step of a policy that reuses keys and values."""

from jaxtyping import Array, Float, Int

from pallas_kernels.choice import Implementation, Operation, Platform
from pallas_kernels.grouped import KeyMask, checked
from pallas_kernels.row_attention import gpu, tpu, xla
from pallas_kernels.row_attention.reference import RowAttention

__all__ = ["OPERATION", "RowAttention", "explain", "row_attention"]

OPERATION = Operation(
    name="row_attention",
    xla=xla.row_attention,
    kernels={"tpu": tpu.row_attention, "cuda": gpu.row_attention},
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
    checked(q, k, mask, lengths)
    return OPERATION.run((q, k, v, mask, lengths), {}, implementation)


def explain(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
) -> dict[Platform, str]:
    """The implementation each platform takes by default, and the reason if it is not a kernel."""
    checked(q, k, mask, lengths)
    return OPERATION.explain((q, k, v, mask, lengths), {})
