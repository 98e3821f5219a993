"""Compiled programs hold memory maps, of which a Linux process has 65 530 at most."""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator

import jax

MAPS = pathlib.Path("/proc/self/maps")

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of every program that XLA is asked for inside of the context, however small."""
    seconds = []
    listener = lambda event, duration, **_: seconds.append(duration) if event == COMPILED else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


TESTS = itertools.count(1)


def forget_in_time():
    """Drops all compiled programs if they take up much of the process's memory maps.

    Counting them takes milliseconds, so after every eighth test.
    """
    if next(TESTS) % 8 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
