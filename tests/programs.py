"""What many small programs share, and when they are dropped.

Compiled programs hold memory maps, of which a Linux process has 65 530 at most.
"""

import functools
import itertools
import pathlib
import threading

import jax

MAPS = pathlib.Path("/proc/self/maps")

TESTS = itertools.count(1)

PROGRAMS = itertools.count()


def share_contexts():
    """Lowers 256 programs in one MLIR context: making one is a quarter of a small program's CPU seconds.

    A context keeps what its programs are made of, so it is left in time; each thread has its own.
    """
    if not jax.__version__.startswith("0.10."):
        return
    from jax._src.interpreters import mlir

    own = mlir.ModuleContext.__init__
    context = functools.lru_cache(maxsize=4)(lambda thread, turn: mlir.make_ir_context())

    def shared(self, **given):
        given["context"] = given.get("context") or context(threading.get_ident(), next(PROGRAMS) // 256)
        own(self, **given)

    mlir.ModuleContext.__init__ = shared


def forget_in_time():
    """Drops all compiled programs if they take up much of the process's memory maps.

    The kernel writes each of them down to have them counted, so this is done after every 16th test. Replays
    of 64 traces have been seen to go from below this number beyond the limit.
    """
    if next(TESTS) % 16 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
