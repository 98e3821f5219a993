"""The branch for a platform whose kernel does not support a shape, in a program other platforms can run."""

from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


def refuse(reason: str, like: Any) -> Any:
    """Placeholders with the shapes of the pytree `like`, which cannot be lowered.

    Raises:
      NotImplementedError: the reason; where it is lowered or run, not where it is traced.
    """
    leaves, tree = jax.tree.flatten(like)
    avals = tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
    return jax.tree.unflatten(tree, _refused.bind(reason=reason, avals=avals))


def _raise(*_, reason: str, avals: tuple[Any, ...]):
    raise NotImplementedError(reason)


_refused = Primitive("refused")  # takes no arrays, so that it need not know of vmap or grad
_refused.multiple_results = True
_refused.def_impl(_raise)
_refused.def_abstract_eval(lambda *, reason, avals: avals)
mlir.register_lowering(_refused, _raise)
