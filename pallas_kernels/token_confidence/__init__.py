"""The best token of each row and how sure the model is of it, straight from hidden rows."""

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
    """See `pallas_kernels.token_confidence.reference.token_confidence`, which defines the meaning.

    Args:
      hidden: rows after the final norm.
      head: vocabulary head, in the same dtype.
      valid: size of the vocabulary; rows of the head from there on are padding.
      forbidden: a token that is never the best one, though it counts in the softmax ([MASK]).
      implementation: see `pallas_kernels.choice.Operation.run`.
    """
    options = dict(valid=vocabulary_size(head, valid, forbidden), forbidden=forbidden)
    return OPERATION.run((hidden, head), options, implementation)
