"""What `token_confidence` means, in plain jnp: all logits at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class TokenConfidence(NamedTuple):
    """The best token of each position and three confidences (larger: surer), see `dllm_jax.samplers.scores`.

    Attributes:
      token: arg-max of the logits, `forbidden` left out, ties to the lowest id; int32.
      probability: of that token, float32 as the others.
      margin: probability of the best token minus that of the second best, `forbidden` left out of the two.
      negative_entropy: sum p log p over the whole vocabulary, in nats.
    """

    token: Int[Array, "b c"]
    probability: Float[Array, "b c"]
    margin: Float[Array, "b c"]
    negative_entropy: Float[Array, "b c"]


def token_confidence(
    hidden: Float[Array, "b c m"],
    head: Float[Array, "v m"],
    valid: int | None = None,
    forbidden: int | None = None,
) -> TokenConfidence:
    """The best token of each position by logits = hidden head^T, and its confidences.

    Logits are float32 and stay so (`unembed` rounds them to the model's dtype). What stands in
    the head from token `valid` on has no influence, NaN included, nor has one position on another.
    Departure from `scores.negative_entropy`: that one adds 1e-10 to p within the logarithm, as the references
    do, which adds at most 1e-10 v (1.3e-5 for LLaDA) to its sum.

    Args:
      hidden: hidden states after the final norm.
      head: vocabulary head, in the same dtype.
      valid: size of the vocabulary; what the head holds from there on is padding. None means all of it.
      forbidden: a token that is never the best one, though it counts in the softmax ([MASK]).

    Raises:
      ValueError: `valid` or `forbidden` out of range.
    """
    valid = vocabulary_size(head, valid, forbidden)
    logits = product(hidden, head)[..., :valid]
    candidates = logits if forbidden is None else logits.at[..., forbidden].set(-jnp.inf)
    token = jnp.argmax(candidates, axis=-1).astype(jnp.int32)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    p = jnp.exp(log_p)
    others = jnp.where(jnp.arange(valid) == token[..., None], -jnp.inf, candidates)
    second = jnp.where(jnp.max(others, axis=-1) > -jnp.inf, _at(p, jnp.argmax(others, axis=-1)), 0.0)
    probability = _at(p, token)
    return TokenConfidence(token, probability, probability - second, jnp.sum(p * log_p, axis=-1))


def product(hidden: Float[Array, "*b m"], head: Float[Array, "v m"]) -> Float[Array, "*b v"]:
    """float32 logits; float32 operands at the highest precision, narrower ones at the hardware's default."""
    contracted = ((hidden.ndim - 1,), (1,))
    return jax.lax.dot_general(
        hidden,
        head,
        (contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _at(values: Float[Array, "b c v"], token: Int[Array, "b c"]) -> Float[Array, "b c"]:
    return jnp.take_along_axis(values, token[..., None], axis=-1)[..., 0]


def vocabulary_size(head: Float[Array, "v m"], valid: int | None, forbidden: int | None) -> int:
    """How many lines of the head are tokens: `valid`, or all of them.

    Raises:
      ValueError: valid is larger than the head or leaves no token that may be chosen.
    """
    size = head.shape[0] if valid is None else valid
    least = 1 if forbidden is None else 2
    if not least <= size <= head.shape[0]:
        raise ValueError(f"valid={valid} must lie in [{least}, {head.shape[0]}]")
    if forbidden is not None and not 0 <= forbidden < size:
        raise ValueError(f"forbidden={forbidden} must lie in [0, {size})")
    return size
