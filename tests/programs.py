"""Compiled programs hold memory maps, of which a Linux process has 65 530 at most."""

import pathlib

import jax

MAPS = pathlib.Path("/proc/self/maps")


def forget_in_time():
    """Drops all compiled programs if they take up much of the process's memory maps."""
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
