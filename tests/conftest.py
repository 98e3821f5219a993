"""Shared settings: tests compile a lot and run little, so compile cheaply and only once per machine."""

import pathlib
import zlib

import jax
import pytest

MAPS = pathlib.Path("/proc/self/maps")
CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"

jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="run every combination of the tests marked `alternate`"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "alternate: every second combination runs, all with --exhaustive")


def pytest_collection_modifyitems(config, items):
    """A chessboard over (policy, family, sampler): each policy meets each of them in some test or other."""
    if config.getoption("exhaustive"):
        return
    seen = {}
    white = {item for item in items if item.get_closest_marker("alternate") and _is_white(item, seen)}
    config.hook.pytest_deselected(items=list(white))
    items[:] = [item for item in items if item not in white]


def _is_white(item, seen: dict) -> bool:
    """Whether the numbers of its parameters, by order of appearance (kept in `seen`), make it odd."""
    number = zlib.crc32(item.originalname.encode())
    for name, value in item.callspec.params.items():
        values = seen.setdefault((item.originalname, name), [])
        if repr(value) not in values:
            values.append(repr(value))
        number += values.index(repr(value))
    return number % 2 == 1


@pytest.fixture(autouse=True)
def forget_programs():
    """Drops compiled programs in time: each holds memory maps, and a Linux process has 65 530 at most."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture
def optimised():
    """Compiles as users do, for tests that look at what the compiler made."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
