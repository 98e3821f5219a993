"""Operations on small arrays done on the host, because XLA would compile a program for each size.

Arrays that other processes hold parts of (`is_global`) never pass through the host: they stay on the devices,
and programs that all processes run change them.
"""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Key, PyTree, Shaped

from dllm_jax.nn.mesh import AnyMesh, gather_everywhere, over_mesh, replicated


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


def readable(array: ArrayLike) -> np.ndarray | None:
    """What this process can check of an array [b p]: all of it, or of a global one the sequences it holds.

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


def everywhere(array: Array) -> np.ndarray:
    """The values of an array on every process, whoever holds them; all processes must call this."""
    return values(_whole(array) if is_global(array) else array)


def _whole(array: Array) -> Array:
    """A global array, all of it on each device."""
    assert isinstance(array.sharding, NamedSharding), "global arrays lie on a mesh"
    return gather_everywhere(array.sharding.mesh)(array)


def place(array: ArrayLike, dtype: DTypeLike, where: Sharding | None = None) -> Array:
    """The array on the device; `jnp.asarray` (jax 0.10) compiles a copy.

    Args:
      array: on the host or on devices.
      dtype: of the result.
      where: on the devices of a mesh instead, of several processes maybe, which then hold the same array.
    """
    if stays_on_devices(array):
        return array.astype(dtype)
    held = np.asarray(values(array), dtype)
    if where is None:
        return jax.device_put(held)
    if where.is_fully_addressable:
        return jax.device_put(held, where)
    return jax.make_array_from_callback(held.shape, where, lambda index: held[index])


def ones(shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """A mask that is True everywhere."""
    return place(np.ones(shape), bool)


def pad(array: Shaped[Array, "b p *d"], left: int, right: int, value: int | bool) -> Shaped[Array, "b q *d"]:
    """The array with more columns on either side; traced arrays are padded in the program they belong to."""
    return _padded(array, ((0, 0), (left, right), *[(0, 0)] * (array.ndim - 2)), value)


def more_sequences(
    array: Shaped[Array, "..."], count: int, value: int | bool, axis: int = 0
) -> Shaped[Array, "..."]:
    """The array with `count` more sequences of one value behind the others."""
    return _padded(array, [(0, count if i == axis else 0) for i in range(array.ndim)], value)


def _padded(array: Array, widths, value: int | bool) -> Array:
    if not any(map(any, widths)):
        return array
    if stays_on_devices(array):
        return jnp.pad(array, widths, constant_values=value)
    return place(np.pad(values(array), widths, constant_values=value), array.dtype)


def part(array: Shaped[Array, "..."], *index: slice, batch: int | None = None) -> Shaped[Array, "..."]:
    """`array[index]`; waits for the array and takes it to the host and back, unless that is all of it.

    Args:
      array: of one device, or split by sequence over a mesh, as the result then is.
      *index: of its axes.
      batch: which axis is that of sequences; a result with fewer of them is replicated over the mesh.
    """
    sizes = zip(index, array.shape, strict=False)
    if all(s.indices(size) == (0, size, 1) for s, size in sizes):
        return array
    fewer = batch is not None and index[batch].indices(array.shape[batch]) != (0, array.shape[batch], 1)
    if isinstance(array, Tracer):
        return over_mesh(lambda a: a[index], array, out=PartitionSpec()) if fewer else array[index]
    where = array.sharding if isinstance(array.sharding, NamedSharding) else None
    if where is not None and fewer:
        where = where.update(spec=PartitionSpec())
    if is_global(array):
        return (_whole(array) if fewer else array)[index]
    return place(values(array)[index], array.dtype, where)


def by_sequence(array: Array, mesh: AnyMesh | None, names: tuple[str, ...], axis: int = 0) -> Array:
    """An array of a request on the mesh of its model, split by sequence.

    Args:
      array: traced (then it is left to the program), global, or of this process, which may hold keys.
      mesh: None, or the abstract one of a traced program, leaves the array where it is.
      names: mesh axes that split the sequences.
      axis: that of sequences.
    """
    if not isinstance(mesh, Mesh) or isinstance(array, Tracer):
        return array
    where = NamedSharding(mesh, PartitionSpec(*[None] * axis, names or None))
    if is_global(array):
        return array if array.sharding == where else jax.jit(lambda a: a, out_shardings=where)(array)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _place_keys(array, where)
    return place(array, array.dtype, where)


def numbers(tree: PyTree, mesh: AnyMesh | None) -> PyTree:
    """Scalars of a request on the devices, the same on all of a mesh; traced ones stay what they are."""
    where = replicated(mesh) if isinstance(mesh, Mesh) else None
    put = lambda number: number if isinstance(number, jax.Array) else place(number, number.dtype, where)
    return jax.tree.map(put, tree)


def _place_keys(keys: Key[Array, "b"], where: NamedSharding) -> Key[Array, "b"]:
    """Keys on the devices of a mesh, by way of the numbers they are made of."""
    data = jax.random.key_data(keys)
    return jax.random.wrap_key_data(place(data, data.dtype, where), impl=jax.random.key_impl(keys))
