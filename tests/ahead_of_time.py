"""Compiling for hardware that is not there."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import topologies


def compiled_for_v5e(
    function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct | None
) -> jax.stages.Compiled:
    """The function compiled by XLA's TPU compiler for one chip; skips the test without libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip('TPU compiler missing: pip install "jax[tpu]" brings libtpu, no TPU is needed')
    sharding = jax.sharding.SingleDeviceSharding(_v5e())
    placed = [x and jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
    lowered = jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",))
    with _unstored():
        return lowered.compile()


@contextlib.contextmanager
def _unstored():
    """Keeps programs out of the compile cache: without a TPU they cannot be read back, which is a warning."""
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def h100() -> contextlib.AbstractContextManager:
    """Tracing and lowering for an H100; jax 0.10 needs to know nothing about the GPU."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    auto = (jax.sharding.AxisType.Auto,)  # no explicit sharding that a kernel would have to keep
    mesh = jax.sharding.AbstractMesh((1,), ("x",), auto, abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@functools.cache
def _v5e() -> Any:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not look for a TPU host's metadata server
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
