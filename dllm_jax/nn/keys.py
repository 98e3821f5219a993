"""Random keys at the door: all draws of the library are threefry's, whatever keys users have.

A row of a batch draws from its own key alone. `jax.vmap` over keys gives that for threefry only: over keys of
"rbg" and "unsafe_rbg", the usual ones on TPUs, it draws by the first of them (jax-ml/jax#21663). So every key
that comes in becomes a threefry key here, and every seed begins with one. No function of the library draws by
a key that did not pass through this file.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Key, UInt32

from dllm_jax.nn.mesh import number_modes
from dllm_jax.options import shown

Keys = Key[Array, "..."] | UInt32[Array, "..."]  # typed, or legacy key data
THREEFRY, WORDS = "threefry2x32", 2  # and the 32-bit words of such a key
LEGACY = {WORDS: THREEFRY, 4: "rbg"}  # implementations by the words of legacy keys; unsafe_rbg has rbg's


@number_modes()
def typed_key(key: Any, name: str = "key") -> Key[Array, "..."]:
    """A random key, or several, as typed threefry keys.

    Threefry keys stay what they are. The words of any other key are folded into a threefry key.

    Args:
      key: typed keys of any implementation, or their words (uint32 [..., 2] of threefry, [..., 4] of rbg).
      name: the argument's name in messages.

    Raises:
      ValueError: no random key, or an implementation whose keys are not 32-bit words.
    """
    rule = "must be a random key, such as jax.random.key(seed)"
    if isinstance(key, np.ndarray):
        key = jnp.asarray(key)
    if not isinstance(key, jax.Array):
        raise ValueError(f"{name}={shown(key)} {rule}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.ndim == 0 or key.shape[-1] not in LEGACY:
            raise ValueError(f"{name} of dtype {key.dtype} and shape {key.shape} {rule}")
        key = jax.random.wrap_key_data(key, impl=LEGACY[key.shape[-1]])
    if jax.random.key_impl(key) == THREEFRY:
        return key
    words = jax.random.key_data(key)
    if words.dtype != jnp.uint32:
        raise ValueError(
            f"{name} is a key of {jax.random.key_impl(key)}, whose data is {words.dtype}; expected uint32. "
            f"Pass jax.random.key(seed, impl={THREEFRY!r})"
        )
    return _folded(words, words.ndim - key.ndim)


@jax.jit(static_argnames="axes")
def _folded(words: UInt32[Array, "..."], axes: int) -> Key[Array, "..."]:
    """A threefry key of the words of each key, which are the last `axes` axes."""
    rows = words.reshape(-1, int(np.prod(words.shape[words.ndim - axes :])))
    key = jnp.broadcast_to(seeded(0), len(rows))
    for column in range(rows.shape[1]):
        key = jax.vmap(jax.random.fold_in)(key, rows[:, column])
    return key.reshape(words.shape[: words.ndim - axes])


def one_key(key: Any) -> Key[Array, ""]:
    """A single key; errors are those of `typed_key`, and several keys are refused."""
    key = typed_key(key)
    if key.ndim:
        raise ValueError(f"key has shape {key.shape}; expected one key, jax.random.key(seed)")
    return key


def seeded(seed: ArrayLike) -> Key[Array, ""]:
    """The key of a seed, whatever `jax_default_prng_impl` says."""
    return jax.random.key(seed, impl=THREEFRY)
