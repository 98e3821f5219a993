"""Nucleus and top-k truncation of a distribution over tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.traced import Number, fixed_at


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
