"""The tokens that positions may be unmasked to: a few sets, and which of them each position has."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dllm_jax.state.host import AnyArray
from dllm_jax.state.rows import gather


class Allowed(NamedTuple):
    """Sets of allowed tokens; positions share them, so that memory grows with the number of different sets.

    Attributes:
      sets: True at the tokens of each set; [MASK] is among them where its probability counts.
      which: Set of each canvas position.
    """

    sets: Bool[AnyArray, "b sets v"]
    which: Int[AnyArray, "b l"]

    def at(self, index: Int[Array, "b c"]) -> Bool[Array, "b c v"]:
        """The tokens allowed at positions; those at padding (index l) must not be used."""
        sets = jnp.asarray(self.sets)
        if sets.shape[1] == 1:
            return jnp.broadcast_to(sets, (*index.shape, sets.shape[2]))
        return jnp.take_along_axis(sets, gather(jnp.asarray(self.which), index)[..., None], axis=1)
