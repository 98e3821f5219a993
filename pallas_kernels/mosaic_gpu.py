"""Parts that kernels for Pallas' Mosaic GPU backend share: where they run, and their interpreter.

jax calls this backend experimental: its functions may change with any version. With a version for which the
kernels were not checked, this module and so every kernel refuses to be imported, and XLA takes their place.
"""

# The types that are checked are those of jax 0.10, which has less of this backend.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

CHECKED = "0.12"  # beginning of the versions of jax
if not jax.__version__.startswith(CHECKED):
    raise ImportError(f"kernels for Mosaic GPU are checked with jax {CHECKED} alone")

# The Tensor Memory Accelerator, which copies tiles to shared memory, came with Hopper.
WITH_TMA = ("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200", "NVIDIA B", "NVIDIA GB")


def interpreted(interpret: bool) -> Any:
    """Returns `interpret` for `plgpu.kernel`: False, or the interpreter with its detection of races.

    Raises:
      NotImplementedError: A GPU that these kernels do not run on.
    """
    if interpret:
        return plgpu.InterpretGPUParams(detect_races=True)
    kind = _gpu()
    if kind is not None and not kind.startswith(WITH_TMA):
        raise NotImplementedError(f"{kind} has no Tensor Memory Accelerator")
    return False


def named(name: str, kernel: Callable[..., None], **static: Any) -> Callable[..., None]:
    """A kernel's body with its static arguments, under the name that profiles and programs show."""

    def body(*refs):
        kernel(*refs, **static)

    body.__name__ = body.__qualname__ = name
    return body


def _gpu() -> str | None:
    """Kind of the GPU that a program is traced for: the one that the context describes, or the one here."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) or jax.local_devices()[0]
    return device.device_kind if device.platform in ("gpu", "cuda") else None
