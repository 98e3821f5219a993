"""Checks installed versions, their compatibility, and the memory."""

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import jax
from packaging.requirements import Requirement
from packaging.version import Version

import dllm_jax as dj
from dllm_jax.check.report import Finding
from dllm_jax.check.speed import Geometry, timed_policies
from dllm_jax.nn.hardware import Hardware
from dllm_jax.provenance import NOT_INSTALLED, device, driver, versions
from dllm_jax.roofline import predict

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "dllm-jax")
EXTRAS = ("tpu", "cuda12", "cuda13")  # of jax, each with plugins of its own
# The oldest driver of each CUDA, by https://docs.jax.dev/en/latest/installation.html.
DRIVERS = {"jax-cuda12-plugin": "525", "jax-cuda13-plugin": "580"}
GPU = Path("/proc/driver/nvidia/version")
LIBRARIES = ("libtpu", "nvidia-cudnn", "nvidia-nccl", "nvidia-cublas")


def environment_findings(spec: dj.ModelSpec, hardware: Hardware) -> Iterator[Finding]:
    """The device, versions, what does not go together, and the memory that a shape needs.

    Args:
      spec: Spec of the model whose speed is measured.
      hardware: this device, of which the capacity counts.
    """
    chip = device()
    client = jax.devices()[0].client.platform_version.splitlines()
    about = {"driver": driver(chip.platform), "runtime": client}
    yield Finding("device", f"{chip.count} x {chip.kind} ({chip.platform})", None, chip._asdict() | about)

    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    extra = [name for name in sorted(filter(None, installed)) if name.startswith((*DRIVERS, *LIBRARIES))]
    listed = versions((*PACKAGES, *extra))
    yield Finding("versions", ", ".join(f"{name} {is_}" for name, is_ in listed.items()), None, listed)

    problems = list(version_mismatches(listed, chip.platform, about["driver"]))
    yield Finding("together", "; ".join(problems) or "all versions go together", not problems)

    policy, layout = timed_policies(spec)[1], dj.Layout(1024, 256, Geometry().block_of(spec), 256)
    memory = predict.work(spec, policy, layout).memory
    # All of the capacity is free where the device does not say what is in use.
    free = hardware.capacity - (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    data = {"needed": memory.total(hardware), "capacity": hardware.capacity, "free": free}
    text = "{policy} at prompt 1024 needs {needed:.1f} GB; of {capacity:.1f} GB {free:.1f} are free"
    told = text.format(policy=type(policy).__name__, **{name: size / 1e9 for name, size in data.items()})
    yield Finding("memory", told, memory.fits(hardware) and free >= data["needed"], data)


def version_mismatches(installed: dict[str, str], platform: str, driver: str | None) -> Iterator[str]:
    """Lists known incompatibilities, a sentence each.

    Args:
      installed: versions by distribution.
      platform: Platform of the default device.
      driver: version of NVIDIA's driver, None if there is none.
    """
    for wanted in required():
        version = installed.get(wanted.name, NOT_INSTALLED)
        if version != NOT_INSTALLED and not wanted.specifier.contains(version, prereleases=True):
            yield f"{wanted.name} {version} is installed, but this jax wants {wanted.specifier}"
    plugins = [name for name in DRIVERS if name in installed]
    if len(plugins) > 1:
        yield f"{' and '.join(plugins)} are both installed: remove one"
    for name in plugins:
        if driver and Version(re.sub(r"[^\d.].*", "", driver)) < Version(DRIVERS[name]):
            yield f"NVIDIA's driver {driver} is older than {DRIVERS[name]}, which {name} needs"
    if platform == "cpu" and GPU.exists():
        yield 'there is an NVIDIA GPU, but jax runs on the CPU: pip install "dllm-jax[cuda]"'


def required() -> Iterator[Requirement]:
    """Reads the requirements of the installed jax for packages of accelerators."""
    for requirement in map(Requirement, importlib.metadata.requires("jax") or ()):
        marker = requirement.marker
        of_plugin = marker is not None and any(marker.evaluate({"extra": extra}) for extra in EXTRAS)
        if of_plugin if requirement.name != "jaxlib" else marker is None:
            yield requirement
