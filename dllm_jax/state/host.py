"""Small arrays are changed on the host, because XLA would compile a program for each size.

Arrays that other processes hold parts of (`is_global`) and traced ones never pass through the host: they stay
on the devices, and programs change them.
"""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Shaped

from dllm_jax.nn.mesh import gather_everywhere
from dllm_jax.options import shown

AnyArray = Array | np.ndarray  # on devices, traced maybe, or on the host


def is_global(array: Any) -> TypeGuard[jax.Array]:
    """Whether an array has parts that only other processes can read."""
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return False
    return not array.is_fully_addressable and not array.is_fully_replicated


def stays_on_devices(array: Any) -> TypeGuard[jax.Array]:
    """Whether an array is changed where it is, by programs: it is traced, or global."""
    return isinstance(array, Tracer) or is_global(array)


def values(array: Any) -> np.ndarray:
    """The values of an array on the host, which must not be traced or global."""
    return np.asarray(jax.device_get(array) if isinstance(array, jax.Array) else array)


def fetched(array: Any) -> jax.Array | np.ndarray:
    """The array on the host, unless it stays on devices."""
    return array if stays_on_devices(array) else values(array)


def array(name: str, value: Any, rule: str) -> jax.Array | np.ndarray:
    """A user's array or list as an array, on the host unless it stays on devices.

    Raises:
      ValueError: it is none; `name` and `rule` say so.
    """
    try:
        return fetched(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}={shown(value)} must be {rule}") from error


def readable(array: ArrayLike) -> np.ndarray | None:
    """Returns the part of an array [b p] that this process can check: its own sequences of a global array.

    None of a traced array, and of a global one whose sequences are split between devices.
    """
    if isinstance(array, Tracer):
        return None
    if not is_global(array):
        return values(array)
    # A part may be held several times; parts are whole sequences unless positions are split too.
    parts = {part.index[0].start or 0: part.data for part in array.addressable_shards}
    if any(part.shape[1:] != array.shape[1:] for part in parts.values()):
        return None
    return np.concatenate([values(parts[start]) for start in sorted(parts)])


def everywhere(array: Any) -> np.ndarray:
    """The values of an array on every process, whoever holds them; all processes must call this."""
    return values(whole(array) if is_global(array) else array)


def whole(array: Array) -> Array:
    """A global array, all of it on each device."""
    assert isinstance(array.sharding, NamedSharding), "global arrays lie on a mesh"
    return gather_everywhere(array.sharding.mesh)(array)


def put(array: ArrayLike, dtype: DTypeLike, where: Sharding | None = None) -> Array:
    """The array on the device; `jnp.asarray` (jax 0.10) compiles a copy.

    Args:
      array: Array on the host or on devices.
      dtype: Dtype of the result.
      where: Sharding on a mesh instead, maybe of several processes, which then hold the same array.
    """
    if stays_on_devices(array):
        return array.astype(dtype)
    on_host = np.asarray(values(array), dtype)
    if where is None:
        return jax.device_put(on_host)
    if where.is_fully_addressable:
        return jax.device_put(on_host, where)

    # On devices of several processes, each process puts the parts that it holds.
    return jax.make_array_from_callback(on_host.shape, where, lambda index: on_host[index])


def module(*arrays: Any) -> Any:
    """Returns the array module for a request: numpy, or jax.numpy for arrays on devices."""
    return jnp if any(map(stays_on_devices, arrays)) else np


def pad(array: Shaped[AnyArray, "b p *d"], left: int, right: int, value: int | bool) -> AnyArray:
    """The array with more columns on either side, on the host unless it stays on devices."""
    widths = ((0, 0), (left, right), *[(0, 0)] * (array.ndim - 2))
    array = fetched(array)
    return module(array).pad(array, widths, constant_values=value) if left or right else array
