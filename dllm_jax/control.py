"""Control flow around arrays that must not be copied."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree


def when(condition: Bool[Array, ""], change: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    """`change(carry)` if the condition holds, else carry: an `if` that changes arrays in place.

    A loop of at most one trip. XLA copies what a `lax.cond` with a writing branch returns (jaxlib 0.10), and
    never what a loop carries.
    """
    trip = lambda state: (jnp.bool_(False), change(state[1]))
    return jax.lax.while_loop(lambda state: state[0], trip, (condition, carry))[1]


def after(first: Float[Array, "..."], then: PyTree) -> PyTree:
    """`then`, unchanged, but not before `first` is computed; first must not hold infinity.

    For reading old values of an array that is about to be overwritten in place: unless the write depends on
    the read, XLA (jaxlib 0.10) copies the whole array first. `lax.optimization_barrier` does not help there.
    """
    never = jnp.any(first == jnp.inf)
    return jax.tree.map(lambda a: jnp.where(never, jnp.zeros_like(a), a), then)
