"""Provenance of results, and their files."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from dllm_jax.provenance import device, now


def provenance(dtype: str) -> dict[str, Any]:
    """Device, driver if known, versions and date, for every result."""
    where = device()
    return {
        "device": where.kind,
        "platform": where.platform,
        "devices": where.count,
        "driver": driver(where.platform),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "dtype": dtype,
        "date": now(),
    }


def driver(platform: str) -> str | None:
    """Version of the accelerator's driver, None if unknown."""
    file = Path("/proc/driver/nvidia/version")
    if platform == "gpu" and file.exists():
        found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text())
        return found.group() if found else None
    return None if platform == "cpu" else jax.devices()[0].client.platform_version.splitlines()[0]


@functools.cache
def default_dtype() -> str:
    """bfloat16 on accelerators; float32 on a CPU, where bfloat16 is emulated."""
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


def read(path: Path | None) -> dict[str, Any]:
    """The contents of a JSON file, empty if there is none."""
    return json.loads(path.read_text()) if path and path.exists() else {}


def write(path: Path | None, where: dict[str, Any], **results: Any):
    """Writes provenance and results as JSON and makes the folder; does nothing without a path."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(where | results, indent=1) + "\n")
