"""Evidence about the correct and fastest implementation on a device.

A model of `dllm_jax.load(..., implementation=None)` carries the entries that hold where its weights lie:
those that `dllm-jax check --record` wrote on this machine, then `SHIPPED`. None of them is believed
before the operation has once been computed by it on small operands in this process (`fault`).
"""

import functools
import json
import os
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.choice import Entry, Evidence, Implementation, Platform, check_implementation
from pallas_kernels.operands import FAMILIES, Family, Operands

# Triton where it was measured, on Hopper: other GPUs have less memory for what a program holds at once.
# After it, for a jax without Triton, Mosaic GPU where XLA's form costs most. None of its kernels was timed,
# so cuDNN's attention goes before its attention.
_PAGE = "docs/dev/gpu-steps.md"
_COUNTED = "docs/dev/compiled.md, launches of a full step, by the compiler and not timed:"
SHIPPED: Evidence = (
    Entry(
        "attention", "cuda", "NVIDIA H", "triton", ("bfloat16",), (1, 64),
        f"{_PAGE}: 32 queries of SDAR-8B, 32800 KV pairs, on an H200: 101 us, XLA 252, cuDNN 448",
    ),
    Entry(
        "attention", "cuda", "", "cudnn", ("bfloat16", "float16"), (1, sys.maxsize),
        f"{_PAGE}: full steps on an H100, 53 us per layer at 1088 positions, Pallas 95",
    ),
    *(
        Entry(name, "cuda", "NVIDIA H", backend, (dtype,), report=f"{_COUNTED} {what}")
        for name, dtype, what in (
            ("attention_and_lse", "bfloat16", "scores are not written"),
            ("received", "bfloat16", "scores are not written"),
            ("ragged_attention", "bfloat16", "one kernel in place of a loop that the host waits for"),
            ("topk_evict", "float32", "one kernel in place of 43 bisections"),
        )
        for backend in ("triton", "mosaic_gpu")
    ),
    Entry(
        "attention_and_lse", "cuda", "", "cudnn", ("bfloat16", "float16"),
        report="as attention, for masks that the kernel does not take",
    ),
    Entry(
        "experts", "cuda", "NVIDIA H", "triton", ("bfloat16",), (1, sys.maxsize),
        f"{_PAGE}: 1280 tokens of LLaDA2-mini on an H200: 455 us per layer, XLA 3248",
    ),
)  # fmt: skip

# How far results may be from those of float32, relative to the largest: roundings of sums in another order.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}


class ImplementationWarning(UserWarning):
    """An implementation that is said to be the best one here is not right, so that XLA's is taken."""


class Deviation(NamedTuple):
    """How far results lie from XLA's of the same operands in float32, and how far they may.

    Attributes:
      error: largest absolute difference, over the largest magnitude; infinite where one of the two is not
        finite, and of integers where any differ.
      allowed: `TOLERANCE`, or twice what XLA's own results in the operands' dtype are off by.
    """

    error: float
    allowed: float

    @property
    def right(self) -> bool:
        """Whether the results are as near as they should be."""
        return self.error <= self.allowed


def asked_for(implementations: Mapping[str, Implementation]) -> Evidence:
    """A user's choice for each operation, `{"attention": "cudnn", "experts": "pallas"}`; XLA's for others.

    Raises:
      ValueError: another operation, or another implementation.
    """
    names = {family.operation.name for family in FAMILIES}
    if unknown := set(implementations) - names:
        raise ValueError(f"implementation: {sorted(unknown)} are not among {', '.join(sorted(names))}")
    for implementation in implementations.values():
        check_implementation(implementation)
    return tuple(
        Entry(name, platform, "", implementation, (), report="as asked for")
        for name, implementation in implementations.items()
        for platform in get_args(Platform)
    )


def user_file() -> Path:
    """Where what was recorded on this machine is kept, in the user's cache directory (XDG)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dllm_jax" / "implementations.json"


def known(device: jax.Device) -> Evidence:
    """The entries that hold on a device, of which the first that speaks of a call decides.

    What was recorded with another jax says nothing. Of a device that is only described, or not this
    process's, and with several processes, whose files may differ, only what ships counts.

    Raises:
      ValueError: a file that is none of ours.
    """
    ours = jax.process_count() == 1 and device in jax.local_devices()
    entries = (*(recorded(user_file()) if ours else ()), *SHIPPED)
    of_device = lambda e: e.platform == platform_of(device) and device.device_kind.startswith(e.device)
    valid = tuple(filter(of_device, entries))
    if not (valid and ours):
        return valid
    # In a thread of its own, where neither `jax.set_mesh` nor `jax.default_device` is in force.
    with ThreadPoolExecutor(1) as alone:
        return tuple(alone.submit(_believed, valid).result())


def platform_of(device: jax.Device) -> Platform | None:
    """The platform that programs for a device are lowered for; None of one that has no forms of its own."""
    platforms: dict[str, Platform] = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu"}
    return platforms.get(device.platform)


def recorded(path: Path) -> Evidence:
    """Reads the entries that `check --record` wrote with this version of jax; none if there is no such file.

    Raises:
      ValueError: the file does not hold entries.
    """
    if not path.is_file():
        return ()
    try:
        content = json.loads(path.read_bytes())
        entries = tuple(Entry.of_fields(fields) for fields in content["entries"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold implementations ({error!r}): remove it") from error
    return entries if content.get("jax") == jax.__version__ else ()


class Reference(NamedTuple):
    """XLA's results in float32, and the deviation of its own in the operands' dtype."""

    exact: Any
    rounding: Deviation

    @staticmethod
    def of(family: Family, case: Operands) -> "Reference":
        """Computes both on the default device."""
        plain = functools.partial(family.operation.xla, **case.options)
        wide = [x.astype(jnp.float32) if _floats(x) else x for x in case.arrays]
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(plain)(*wide)
        error = _most_off(jax.jit(plain)(*case.arrays), exact)
        narrow = [str(x.dtype) for x in case.arrays if _floats(x)]
        return Reference(
            exact, Deviation(error, max(2 * error, *(TOLERANCE.get(name, 0) for name in narrow)))
        )


def deviation(
    family: Family, case: Operands, implementation: Implementation, reference: Reference | None = None
) -> Deviation:
    """Compares an implementation on the default device with XLA's, of operands of one shape.

    Args:
      family: the operation.
      case: the operands.
      implementation: Implementation to compare with XLA's.
      reference: Result of XLA for the same operands, if it has been computed already.

    Raises:
      NotImplementedError: it does not support the call, and why.
    """
    if implementation == "xla":
        return (reference or Reference.of(family, case)).rounding
    ours = jax.jit(functools.partial(run, family, case, implementation))(*case.arrays)
    exact, rounding = reference or Reference.of(family, case)
    return Deviation(_most_off(ours, exact), rounding.allowed)


def run(family: Family, case: Operands, implementation: Implementation, *arrays: jax.Array) -> object:
    """The operation by this implementation and no other.

    Raises:
      NotImplementedError: it does not support the call, and why.
    """
    platform = platform_of(jax.devices()[0])
    if implementation != "xla":  # XLA's form would be taken silently
        why = f"no kernels for {jax.devices()[0].platform}"
        if platform is not None:
            why = family.operation.unsupported(platform, arrays, case.options, implementation)
        if why:
            raise NotImplementedError(why)
    return family.operation.run(arrays, case.options, implementation)


@functools.cache
def fault(operation: str, implementation: Implementation, dtype: str) -> str | None:
    """Returns the fault of an implementation on the default device; runs small inputs, once per process.

    None if nothing is, or if it takes none of the small shapes.
    """
    (family,) = (family for family in FAMILIES if family.operation.name == operation)
    for shape in family.small:
        case = family.make(shape, jnp.dtype(dtype))
        try:
            result = deviation(family, case, implementation)
        except NotImplementedError:
            continue
        except Exception as error:  # a missing backend, or any other fault, would come later too
            return str(error).strip().partition("\n")[0] or type(error).__name__
        return None if result.right else f"{result.error:.2g} off; rounding explains {result.allowed:.2g}"
    return None


def _believed(entries: Evidence) -> list[Entry]:
    """Drops entries that are wrong here, and untried those of Mosaic GPU where Triton's kernel is right."""
    trusted: list[Entry] = []
    for entry in entries:
        second = entry.implementation == "mosaic_gpu" and any(
            other.implementation == "triton"
            and (other.operation, other.dtypes) == (entry.operation, entry.dtypes)
            for other in trusted
        )
        if not second and _is_right(entry):
            trusted.append(entry)
    return trusted


def _is_right(entry: Entry) -> bool:
    for dtype in entry.dtypes if entry.implementation != "xla" else ():
        if reason := fault(entry.operation, entry.implementation, dtype):
            what = f"{entry.implementation} {entry.operation} failed its correctness check on this device"
            warnings.warn(
                f"{what} ({dtype}: {reason}); using XLA instead", ImplementationWarning, stacklevel=1
            )
            return False
    return True


def _floats(x: object) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _most_off(ours: Any, exact: Any) -> float:
    return max(_off(*pair) for pair in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True))


def _off(ours: jax.Array, exact: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64) for x in (ours, exact))
    if not jnp.issubdtype(exact.dtype, jnp.floating):
        return float(np.inf if (a != b).any() else 0)
    # A query that may attend to nothing has the log-sum-exp -inf; elsewhere results are finite.
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not (np.isfinite(a) & np.isfinite(b) | same).all():
        return float("inf")
    scale = np.max(np.abs(b), where=np.isfinite(b), initial=0)
    return float(np.max(np.abs(a - b), where=~same, initial=0) / (scale or 1))
