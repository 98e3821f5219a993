"""Control flow around arrays that must not be copied."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

REFRESH = "refresh"  # name scope of what a partial step runs only where a refresh is due
UPDATE = "update_"  # begins that of an update in one of several widths, which ends with the width


def when(
    condition: Bool[Array, ""], change: Callable[[PyTree], PyTree], carry: PyTree, name: str = "when"
) -> PyTree:
    """`change(carry)` if the condition holds, else carry: an `if` that changes arrays in place.

    A loop of at most one trip: XLA (jaxlib 0.10) copies the arrays that a `lax.cond` with a writing branch
    returns, but not those that a loop carries. `name` is the name scope of the change's operations.
    """

    def trip(state):
        with jax.named_scope(name):
            return jnp.bool_(False), change(state[1])

    return jax.lax.while_loop(lambda state: state[0], trip, (condition, carry))[1]
