"""Shared settings: tests compile a lot and run little, so compile cheaply and only once per machine."""

import pathlib

import jax
import pytest

MAPS = pathlib.Path("/proc/self/maps")
CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"

jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def forget_programs():
    """Drops compiled programs in time: each holds memory maps, of which a Linux process has 65 530 at most."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture
def optimised():
    """Compiles as users do, for tests that look at what the compiler made."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
