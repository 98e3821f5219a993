"""What every measurement needs: where it was taken, how long a run takes, what the device can do at most."""

import dataclasses
import datetime
import functools
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version

from dllm_jax.arithmetic import precision
from dllm_jax.roofline import HARDWARE, Hardware


def provenance(dtype: str) -> dict[str, Any]:
    """Device, driver where it is known, versions, date: goes into every result."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "driver": driver(device.platform),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "dtype": dtype,
        "date": datetime.date.today().isoformat(),
    }


def driver(platform: str) -> str | None:
    """Version of the accelerator's driver, None where it is not known."""
    file = Path("/proc/driver/nvidia/version")
    if platform == "gpu" and file.exists():
        found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text())
        return found.group() if found else None
    return None if platform == "cpu" else jax.devices()[0].client.platform_version.splitlines()[0]


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of repeated runs.

    Attributes:
      median: of the runs.
      low: the fastest.
      high: the slowest.
      runs: how many.
    """

    median: float
    low: float
    high: float
    runs: int

    @staticmethod
    def of(seconds: list[float]) -> "Time":
        """Sums up the runs."""
        return Time(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def scaled(self, factor: float) -> "Time":
        """The same per step, or in another unit."""
        return Time(self.median * factor, self.low * factor, self.high * factor, self.runs)


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one run, until its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def timed(run: Callable[[], Any], repeats: int, calls: int = 1) -> Time:
    """Time of a run, after one that is not counted; `calls` of them are queued and share one waiting."""
    jax.block_until_ready(run())

    def several():
        outs = [run() for _ in range(calls)]
        return outs[-1]

    return Time.of([seconds(several) / calls for _ in range(repeats)])


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Time]:
    """Times of several runs that take turns, so that what else the machine does hits all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            taken[name].append(seconds(run))
    return {name: Time.of(values) for name, values in taken.items()}


def ceilings(dtype: str, repeats: int = 5, megabytes: int | None = None, side: int | None = None) -> Hardware:
    """The rates of this device, measured: the roofs that its other figures are compared with.

    Bandwidth is the better of a copy and of a product with one vector, which reads a matrix once as a step of
    few rows does; the rate of arithmetic that of a square product, at the precision the model uses.

    Args:
      dtype: of the operands.
      repeats: timed runs, of which the fastest counts.
      megabytes: size of the matrix that is streamed.
      side: of the square product.
    """
    device = jax.devices()[0]
    small = device.platform == "cpu"
    megabytes = megabytes or (256 if small else 2048)
    side = side or (1024 if small else 8192)
    size = megabytes * 10**6 // (4096 * jnp.dtype(dtype).itemsize)
    matrix, vector = jnp.ones((size, 4096), dtype), jnp.ones((4096,), dtype)
    calls = 1 if small else 8
    best = lambda run, *args: timed(lambda: run(*args), repeats, calls).low
    rates = {
        "copy": 2 * matrix.nbytes / best(_plus_one, matrix),
        "vector": matrix.nbytes / best(_product, matrix, vector),
    }
    del matrix
    square = jnp.ones((side, side), dtype)
    flops = 2 * side**3 / best(_product, square, square)
    stats = device.memory_stats() or {}
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    capacity = float(stats.get("bytes_limit", host))
    notes = f"measured: copy {rates['copy']:.3g} B/s, matrix times vector {rates['vector']:.3g} B/s"
    return Hardware(device.device_kind, flops, max(rates.values()), capacity, notes)


def nominal(kind: str) -> str | None:
    """Key of the device in the table of data sheets, None if it is not there.

    Args:
      kind: `device_kind`, e.g. "NVIDIA H100 80GB HBM3", "TPU v5 lite".
    """
    known = {"H100": "h100", "H200": "h200", "A100": "a100", "TPU v5 lite": "v5e", "TPU v5e": "v5e"}
    known |= {"TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6": "v6e", "TPU7x": "v7x", "TPU v7": "v7x"}
    found = next((key for name, key in known.items() if name in kind), None)
    is_sxm = "PCIe" not in kind and "NVL" not in kind and "40GB" not in kind
    assert found is None or found in HARDWARE
    return found if is_sxm else None


@jax.jit
def _plus_one(x):
    return x + 1


@jax.jit
def _product(x, y):
    return jnp.matmul(x, y, precision=precision(x.dtype))


@functools.cache
def default_dtype() -> str:
    """bfloat16 on accelerators; float32 on a CPU, where bfloat16 is emulated."""
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


def peak_bytes() -> int | None:
    """The most memory the device held since the process began, None where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
