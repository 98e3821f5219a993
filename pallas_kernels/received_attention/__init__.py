"""What attention shows afterwards, from its log-sum-exp: who received it, and its mean over heads."""

from jaxtyping import Array, Float, Int

from pallas_kernels.choice import Implementation, Operation
from pallas_kernels.grouped import KeyMask, checked
from pallas_kernels.received_attention import gpu, tpu, xla

__all__ = ["HEAD_MEAN", "RECEIVED", "head_mean", "received"]

RECEIVED = Operation(name="received", xla=xla.received, kernels={"tpu": tpu.received, "cuda": gpu.received})
HEAD_MEAN = Operation(
    name="head_mean", xla=xla.head_mean, kernels={"tpu": tpu.head_mean, "cuda": gpu.head_mean}
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
      implementation: see `pallas_kernels.choice.Operation.run`; `RECEIVED.explain` says what None takes.
    """
    checked(q, k, mask, lengths)
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
    checked(q, k, mask, lengths)
    return HEAD_MEAN.run((q, k, lse, mask, lengths), {}, implementation)
