"""How arrays lie in memory: the physical order of axes, which XLA would otherwise choose for each loop anew.

The axes that programs name stay [b s k d]. In memory, heads come before positions, since attention multiplies
one head at a time. Left to itself, XLA picks one order for the loop of full steps and another one for partial
steps, and copies the whole cache from one to the other whenever a block begins.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

# Stacked parameters that TPU programs read heads first: [n h m d] in memory for the axes n m h d.
STACKED_HEADS_FIRST = {leaf: Layout((0, 2, 1, 3)) for leaf in ("q", "k", "v")}


def heads_first(x: Float[Array, "*n b s k d"]) -> Float[Array, "*n b s k d"]:
    """The same array; in the memory of GPUs and TPUs it lies [*n b k s d], on CPUs as it is named."""
    # XLA's CPU compiler keeps no layout but its own through a loop: it would copy the cache at every write.
    return jax.lax.platform_dependent(x, tpu=_heads_first, cuda=_heads_first, default=lambda x: x)


def heads_first_on_tpu(x: Float[Array, "b q h d"]) -> Float[Array, "b q h d"]:
    """Projected heads as `heads_first` on TPUs alone, where XLA would else turn their weights around."""
    return jax.lax.platform_dependent(x, tpu=_heads_first, default=lambda x: x)


def _heads_first(x: Float[Array, "*n b s k d"]) -> Float[Array, "*n b s k d"]:
    order = tuple(range(x.ndim))
    return with_layout_constraint(x, Layout((*order[:-3], order[-2], order[-3], order[-1])))
