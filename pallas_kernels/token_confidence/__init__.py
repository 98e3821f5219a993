"""The best token of each position and how sure the model is of it, straight from the hidden states."""

from jaxtyping import Array, Float

from pallas_kernels.choice import Implementation, Operation, imported
from pallas_kernels.token_confidence import xla
from pallas_kernels.token_confidence.reference import TokenConfidence, vocabulary_size

__all__ = ["OPERATION", "TokenConfidence", "token_confidence"]

OPERATION = Operation(
    name="token_confidence",
    xla=xla.token_confidence,
    kernels={
        "tpu": imported("pallas_kernels.token_confidence.tpu", "token_confidence"),
        "cuda": imported("pallas_kernels.token_confidence.gpu", "token_confidence"),
    },
)


def token_confidence(
    hidden: Float[Array, "b c m"],
    head: Float[Array, "v m"],
    valid: int | None = None,
    forbidden: int | None = None,
    implementation: Implementation | None = None,
) -> TokenConfidence:
    """The best tokens and their confidences, as `reference.token_confidence` defines them.

    Args:
      hidden: hidden states after the final norm.
      head: vocabulary head, in the same dtype.
      valid: size of the vocabulary; what the head holds from there on is padding. None means all of it.
      forbidden: a token that is never the best one, though it counts in the softmax ([MASK]).
      implementation: see `pallas_kernels.choice`.

    Raises:
      ValueError: `valid` or `forbidden` out of range, or another implementation.
    """
    options = dict(valid=vocabulary_size(head, valid, forbidden), forbidden=forbidden)
    return OPERATION.run((hidden, head), options, implementation)
