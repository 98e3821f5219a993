"""Dependencies that XLA would not see: what has to be finished before something else begins."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree


def read_before_write(read: Float[Array, "..."], inputs: PyTree) -> PyTree:
    """The inputs of a write, unchanged, but available only after `read`.

    If that holds infinity, an overflow, numbers become NaN, which ends the sequence, and indices the largest,
    at which nothing is written.

    For old values of an array that are read before new ones overwrite them in place.
    `lax.optimization_barrier` does not prevent the copy.

    Symptom: Unless the write depends on the read, XLA copies the whole array before the write.
    Seen on: CPU, jaxlib 0.10.2.
    Cost: Before, two copies of the store in each trip of a small loop; after, none.
    Test: test_xla.py::test_a_store_is_not_copied_in_a_loop
    """
    never = jnp.any(read == jnp.inf)
    return jax.tree.map(lambda a: jnp.where(never, _overflown(a.dtype), a), inputs)


def _overflown(dtype: DTypeLike) -> Array:
    """A value that shows an overflow, or writes nothing as an index."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.nan, dtype)
    return jnp.asarray(jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else False, dtype)


def after_on_tpu(first: Float[Array, "..."], then: Float[Array, "..."]) -> Float[Array, "..."]:
    """`then`, unchanged, but on TPUs available only after `first`; NaN if that overflows.

    For what needs VMEM besides an MLP.

    Symptom: While XLA may compute `first` before or after the MLP, it keeps the MLP's widest result in main
      memory. `lax.optimization_barrier` changes nothing.
    Seen on: TPU v6e, jaxlib 0.10.2.
    Cost: A full step of `D2Cache` before 1.17 of the roofline, after 1.05.
    Test: test_xla.py::test_a_value_waits_for_the_first_one_on_its_platform
    """
    return jax.lax.platform_dependent(first, then, tpu=read_before_write, default=lambda first, then: then)


def after_on_cuda(first: Float[Array, "..."], then: Float[Array, "..."]) -> Float[Array, "..."]:
    """`then`, unchanged, but on CUDA available only after `first`; NaN if that overflows.

    For statistics of a layer's attention scores that nothing needs before the last layer.

    Symptom: XLA computes the statistics after the last layer, and holds the scores of all layers until then.
    Seen on: H100, jaxlib 0.10.2.
    Cost: Temporaries of 12 layers, `MaskKV` before 2.84 GB, after 0.95; `ElasticCache` before 2.83, after
      0.72.
    Test: test_xla.py::test_a_value_waits_for_the_first_one_on_its_platform
    """
    return jax.lax.platform_dependent(first, then, cuda=read_before_write, default=lambda first, then: then)


def before_loops(tables: PyTree) -> PyTree:
    """Constants of a program's loops, computed before these begin.

    Symptom: XLA moves parts of the rotary tables into nested loops, and its TPU compiler then fails an
      internal check.
    Seen on: TPU v6e, jaxlib 0.10.2 and 0.12.
    Cost: Before, `Policy()` did not compile; after, it does.
    Test: test_xla.py::test_tables_are_finished_before_loops_begin
    """
    return jax.lax.optimization_barrier(tables)
