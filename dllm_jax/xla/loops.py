"""Control flow around arrays that must not be copied: loops of at most one trip instead of branches."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

Carry = TypeVar("Carry")

REFRESH = "refresh"  # name scope of what a partial step runs only where a refresh is due
UPDATE = "update_"  # begins that of an update in one of several widths, which ends with the width


def when(
    condition: Bool[Array, ""], change: Callable[[PyTree], PyTree], carry: PyTree, name: str = "when"
) -> PyTree:
    """`change(carry)` if the condition holds, else carry: an `if` that changes arrays in place.

    Symptom: XLA copies the arrays that a `lax.cond` returns if both branches write, or if the second one does
      nothing. It does not copy those that a loop carries.
    Seen on: CPU, jaxlib 0.10.2; no longer with 0.11.2 and 0.12.
    Cost: Before, by two branches that write, three copies of the store in each trip of a loop; after, none.
    Test: test_xla.py::test_a_store_is_not_copied_in_a_loop

    Args:
      condition: Whether anything changes.
      change: Function of the carry.
      carry: State that `change` returns changed.
      name: Name scope of the change's operations.
    """

    def trip(state):
        with jax.named_scope(name):
            return jnp.bool_(False), change(state[1])

    return jax.lax.while_loop(lambda state: state[0], trip, (condition, carry))[1]


def at_most_once(
    condition: Bool[Array, ""] | bool,
    body: Callable[[Int[Array, ""], Carry], Carry],
    carry: Carry,
    name: str | None = None,
) -> Carry:
    """`body(trip, carry)` if the condition holds, else carry; `when` for bodies that read stacked weights.

    The trip is the loop's counter: 0 whenever the body runs, which XLA does not know. Reads that depend on it
    (`stacks.OneOfStacked.in_trip`) stay inside.

    Symptom: Branches of a `lax.switch` copy the caches that they write, as those of `lax.cond`.
    Seen on: CPU, jaxlib 0.10.2; no longer with 0.11.2 and 0.12.
    Cost: That of `when`; for weights see `stacks.OneOfStacked`.
    Test: test_xla.py::test_a_store_is_not_copied_in_a_loop

    Args:
      condition: Whether the body runs.
      body: Function of the loop's counter and the carry.
      carry: State that the body returns changed.
      name: Name scope of the body's operations; None for none.
    """

    def run(trip: Int[Array, ""], carry: Carry) -> Carry:
        if name is None:
            return body(trip, carry)
        with jax.named_scope(name):
            return body(trip, carry)

    return jax.lax.fori_loop(0, jnp.int32(condition), run, carry)


def apart_on_cpu(
    read: Callable[[Array, Array], Array], array: Shaped[Array, "..."], at: Int[Array, "..."]
) -> Shaped[Array, "..."]:
    """`read(array, at)`, a slice at nonnegative places, which no reader of it takes in on CPUs.

    Symptom: XLA fuses the slice of a cache into its readers, and then copies the whole cache before the step
      writes to it. It fuses no branch.
    Seen on: CPU, jaxlib 0.10.2.
    Cost: Before, two copies of the store in each trip of a small loop; after, none.
    Test: test_xla.py::test_a_store_is_not_copied_in_a_loop
    """
    none = lambda array, at: jnp.zeros_like(read(array, at))
    branch = lambda array, at: jax.lax.cond(jnp.all(at >= 0), read, none, array, at)
    return jax.lax.platform_dependent(array, at, cpu=branch, default=read)
