"""Timing of runs, and the rates this device reaches."""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.check.weights import drawn
from dllm_jax.nn.arithmetic import precision
from dllm_jax.nn.keys import seeded
from dllm_jax.roofline import Hardware


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of repeated runs, or another quantity with one value per run, in order."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @staticmethod
    def of(values: list[float]) -> "Time":
        """Summarizes the values."""
        return Time(statistics.median(values), min(values), max(values), tuple(values))

    def scaled(self, factor: float) -> "Time":
        """Every value times `factor`."""
        return Time.of([value * factor for value in self.values])

    def over(self, other: "Time") -> "Time":
        """Per-turn ratios `self / other`; a single run is reused for every turn."""
        turns = max(len(self.values), len(other.values))
        pairs = zip(*(t.values * (turns if len(t.values) == 1 else 1) for t in (self, other)), strict=True)
        return Time.of([mine / theirs for mine, theirs in pairs])


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one run, results included."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def several(run: Callable[[], Any], calls: int) -> Any:
    """The last result of `calls` calls, which are queued without waiting for each other."""
    for _ in range(calls - 1):
        run()
    return run()


def timed(run: Callable[[], Any], repeats: int, calls: int = 1) -> Time:
    """Time per call after one warm-up; each run queues `calls` of them and blocks once."""
    jax.block_until_ready(run())
    return Time.of([seconds(lambda: several(run, calls)) / calls for _ in range(repeats)])


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Time]:
    """Times several runs in turns, so that other load on the machine slows all of them alike."""
    turns = [[seconds(run) for run in runs.values()] for _ in range(repeats)]
    return {name: Time.of(list(taken)) for name, taken in zip(runs, zip(*turns, strict=True), strict=True)}


def ceilings(dtype: str, repeats: int = 5, megabytes: int | None = None, side: int | None = None) -> Hardware:
    """Measures the rates of this device, which its other figures are compared with; the fastest run counts.

    Bandwidth is the better of a copy and a matrix-vector product, which reads the matrix of so many
    `megabytes` once, as a step of few positions does. Arithmetic is a product of square matrices of this
    `side`, at the model's precision and in float32. Operands are random, and smaller on CPUs.
    """
    device = jax.devices()[0]
    small = device.platform == "cpu"
    megabytes, calls = megabytes or (64 if small else 2048), 1 if small else 8
    best = lambda run, *args: timed(lambda: run(*args), repeats, calls).low
    rows = 64 * (megabytes * 10**6 // (64 * 4096 * jnp.dtype(dtype).itemsize))
    matrix, vector = _random((rows, 4096), dtype), _random((4096,), dtype)
    copy = 2 * matrix.nbytes / best(jax.jit(lambda x: x + 1), matrix)
    product = matrix.nbytes / best(_product, matrix, vector)
    del matrix
    side = side or (512 if small else 8192)
    rates = {}
    for kind in dict.fromkeys((jnp.dtype(dtype).name, "float32")):
        square = _random((side, side), kind)
        rates[kind] = 2 * side**3 / best(_product, square, square)
    capacity = float((device.memory_stats() or {}).get("bytes_limit", _memory_of_the_host()))
    notes = f"measured: copy {copy:.3g} B/s, matrix times vector {product:.3g} B/s"
    flops = rates[jnp.dtype(dtype).name]
    return Hardware(device.device_kind, flops, max(copy, product), capacity, notes, rates["float32"])


def _memory_of_the_host() -> int:
    """Bytes of memory of this machine; 16 GB where the system does not tell (Windows)."""
    if not hasattr(os, "sysconf"):
        return 16 * 10**9
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _random(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return drawn(seeded(len(shape)), 64, shape, dtype)


@jax.jit
def _product(x, y):
    return jnp.matmul(x, y, precision=precision(x.dtype))


def peak_bytes() -> int | None:
    """Peak device memory of this process, None if the device does not report it."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
