"""Compiled programs hold memory maps, of which a Linux process has 65 530 at most."""

import itertools
import pathlib

import jax

MAPS = pathlib.Path("/proc/self/maps")

TESTS = itertools.count(1)


def forget_in_time():
    """Drops all compiled programs if they take up much of the process's memory maps.

    The kernel writes each of them down to have them counted, so this is done after every 16th test. Replays
    of 64 traces have been seen to go from below this number beyond the limit.
    """
    if next(TESTS) % 16 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
