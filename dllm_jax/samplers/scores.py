"""How sure the model is of a token: probability, margin, negative entropy; and which tokens to draw from.

Larger is surer. `logits` are float32, -inf where a token is ruled out. The softmax runs over all other
tokens, [MASK] included, so a position where the model prefers [MASK] does not count as certain.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.nn.arithmetic import of_token
from dllm_jax.traced import Number, fixed_at


def probability(logits: Float[Array, "b c v"], token: Int[Array, "b c"]) -> Float[Array, "b c"]:
    """Probability of the token, softmax(logits)[token], in [0, 1]."""
    return jnp.exp(of_token(logits, token) - jax.nn.logsumexp(logits, axis=-1))


def margin(logits: Float[Array, "b c v"], mask_id: int | None) -> Float[Array, "b c"]:
    """Probability of the best token minus that of the second best, in [0, 1].

    Args:
      logits: float32.
      mask_id: a token that is neither of the two, though its probability counts in the softmax; or None.
    """
    candidates = logits if mask_id is None else ruled_out(logits, mask_id)
    best = jax.lax.top_k(candidates, 2)[0]
    p = jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return p[..., 0] - p[..., 1]


def negative_entropy(logits: Float[Array, "b c v"]) -> Float[Array, "b c"]:
    """Negative entropy sum p log(p + 1e-10) in nats, at most 0; the offset is the reference's."""
    p = jax.nn.softmax(logits, axis=-1)
    return jnp.sum(p * jnp.log(p + 1e-10), axis=-1)


def ruled_out(logits: Float[Array, "b c v"], *tokens: int | None) -> Float[Array, "b c v"]:
    """The logits with probability 0 for these tokens; None is a token that the model does not have."""
    # A scatter would be a loop of its own on CPUs; a comparison may go into what reads the logits.
    ids = jnp.asarray([t for t in tokens if t is not None])
    out = jnp.any(jnp.arange(logits.shape[-1])[:, None] == ids, axis=1)
    return jnp.where(out, -jnp.inf, logits)


def survivors(logits: Float[Array, "b c v"], top_p: Number | None, top_k: int | None) -> Bool[Array, "b c v"]:
    """Marks the tokens to sample from: the nucleus, then the k most likely tokens in it.

    A token is in the nucleus if the mass of the tokens ranked before it is at most `top_p`; the best
    always is. Tokens tied with the k-th largest all stay.
    """
    keep = jnp.ones(logits.shape, bool)

    # The mass *before* a token decides, so the token that crosses top_p still belongs to the nucleus.
    if top_p is not None and not fixed_at(top_p, 1):
        order = jnp.argsort(-logits, axis=-1, stable=True)
        p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        # Rounding may leave a mass before the best token that is not exactly 0.
        in_nucleus = (before <= top_p).at[..., 0].set(True)
        keep = jnp.put_along_axis(keep, order, in_nucleus, axis=-1, inplace=False)

    # Compared by value rather than by rank: tokens tied with the k-th largest stay, as in Dream's reference.
    if top_k is not None:
        left = jnp.where(keep, logits, -jnp.inf)
        kth = jax.lax.top_k(left, min(top_k, logits.shape[-1]))[0][..., -1:]
        keep &= left >= kth
    return keep
