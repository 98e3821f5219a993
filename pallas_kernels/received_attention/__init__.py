"""What attention shows afterwards, from its log-sum-exp: who received it, and its mean over heads."""

from jaxtyping import Array, Float, Int

from pallas_kernels.choice import Implementation, Operation, imported
from pallas_kernels.grouped import KeyMask, check_shapes
from pallas_kernels.received_attention import xla

__all__ = ["HEAD_MEAN", "RECEIVED", "head_mean", "received"]

RECEIVED, HEAD_MEAN = (
    Operation(
        name=name,
        xla=plain,
        kernels={
            "tpu": imported("pallas_kernels.received_attention.tpu", name),
            "cuda": imported("pallas_kernels.received_attention.gpu", name),
        },
    )
    for name, plain in (("received", xla.received), ("head_mean", xla.head_mean))
)


def received(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    weight: Float[Array, "b q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b k s"]:
    """See `pallas_kernels.received_attention.reference.received`, which defines the meaning.

    Args:
      q: queries; head i reads kv head i // (h // k).
      k: keys, in the same dtype.
      lse: log sum exp of the scaled scores, as `row_attention` gives it.
      weight: of each query row, float32.
      mask: slots that may be attended to, for all kv heads or for each; None means all.
      lengths: each kv head may read its first `lengths` slots; None means all.
      implementation: see `pallas_kernels.choice.Operation.run`.
    """
    check_shapes(q, k, mask, lengths)
    return RECEIVED.run((q, k, lse, weight, mask, lengths), {}, implementation)


def head_mean(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    mask: KeyMask | None = None,
    lengths: Int[Array, "b k"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "b q s"]:
    """See `pallas_kernels.received_attention.reference.head_mean`; arguments as of `received`."""
    check_shapes(q, k, mask, lengths)
    return HEAD_MEAN.run((q, k, lse, mask, lengths), {}, implementation)
