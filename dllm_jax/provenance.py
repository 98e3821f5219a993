"""Where and when something was made: what goes beside results and converted checkpoints."""

import datetime
import importlib.metadata
from collections.abc import Iterable
from typing import NamedTuple

import jax

NOT_INSTALLED = "not installed"  # dllm_jax itself, run from a checkout


class Device(NamedTuple):
    """The devices of this process, all of one kind.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the model, e.g. "NVIDIA H100 80GB HBM3".
      count: how many devices there are.
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


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
