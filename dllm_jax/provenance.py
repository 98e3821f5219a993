"""Where and when something was made: what goes with results and converted checkpoints."""

import datetime
import importlib.metadata
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version

NVIDIA = "/proc/driver/nvidia/version"
NOT_INSTALLED = "not installed"  # dllm_jax itself, run from a checkout


class Device(NamedTuple):
    """The devices of this process, all of one kind.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the model, e.g. "NVIDIA H100 80GB HBM3".
      count: Number of devices.
    """

    platform: str
    kind: str
    count: int


def device() -> Device:
    """Describes the default device and counts the devices."""
    first = jax.devices()[0]
    return Device(first.platform, first.device_kind, jax.device_count())


def versions(names: Iterable[str]) -> dict[str, str]:
    """The installed version of each distribution by name, or `NOT_INSTALLED`."""
    return {name: _version(name) for name in names}


def now() -> str:
    """The current date and time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def measured_on(dtype: str) -> dict[str, Any]:
    """Device, driver and CPU if known, cores, versions and date, for every result."""
    where = device()
    return {
        "device": where.kind, "platform": where.platform, "devices": where.count, "cpu": processor(),
        "cores": cores(), "driver": driver(where.platform), "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__, "dllm_jax": _version("dllm-jax"), "dtype": dtype, "date": now(),
    }  # fmt: skip


def cores() -> int:
    """Number of cores that this process may run on; of the machine, where the system does not tell."""
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def processor() -> str | None:
    """Model of the CPU as the kernel names it, None if unknown."""
    return _found("/proc/cpuinfo", r"^model name\s*: (.*)$")


def driver(platform: str) -> str | None:
    """Version of the accelerator's driver, None if unknown."""
    if platform == "gpu" and os.path.exists(NVIDIA):
        return _found(NVIDIA, r"(\d+\.\d+(?:\.\d+)?)")
    return None if platform == "cpu" else jax.devices()[0].client.platform_version.splitlines()[0]


def _found(path: str, pattern: str) -> str | None:
    """The first group of a pattern in a file; None without the file or a match."""
    match = re.search(pattern, Path(path).read_text(), re.MULTILINE) if os.path.exists(path) else None
    return match[1] if match else None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
