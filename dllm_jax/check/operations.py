"""Every implementation of every operation that claims to run here: is it right, and how fast is it?"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dllm_jax.check import timing
from dllm_jax.check.report import Finding, failed
from dllm_jax.eval.run.files import write_json
from dllm_jax.nn.hardware import Hardware
from pallas_kernels.choice import NAMES, Entry, Evidence, Implementation
from pallas_kernels.evidence import Reference, deviation, known, platform_of, run
from pallas_kernels.operands import FAMILIES, Family, Operands

CALLS = 20  # queued per timed run on an accelerator
MARGIN = 1.05  # times faster than XLA's at which another implementation is set
SMALL = 3  # of the small shapes, which have odd lengths, masks of all kinds and grouped heads; if quick, one


def operation_findings(
    hardware: Hardware,
    dtypes: Sequence[str],
    quick: bool,
    families: Sequence[Family] = FAMILIES,
    repeats: int = 7,
) -> Iterator[Finding]:
    """One finding per operation, shape and dtype, of all implementations.

    Args:
      hardware: this device, at its measured rates.
      dtypes: Dtypes of the operands.
      quick: the small shapes alone. On CPUs, which interpret kernels, there are no others.
      families: Operations to check.
      repeats: timed turns of each implementation.
    """
    small = quick or jax.devices()[0].platform == "cpu"
    for family in families:
        shapes = [(*shape, 0) for shape in list(family.shapes(small=True))[: 1 if quick else SMALL]]
        shapes += [] if small else [(*shape, repeats) for shape in family.shapes(small=False)]
        for (name, shape, turns), dtype in itertools.product(shapes, dtypes):
            title = f"{family.operation.name}, {name}, {dtype}"
            try:
                case = family.make(shape, jnp.dtype(dtype))
                yield _finding(title, family, case, name, dtype, hardware, turns)
            except Exception as error:  # the other operations are looked at all the same
                yield failed(title, error)


def _finding(
    title: str, family: Family, case: Operands, shape: str, dtype: str, hardware: Hardware, repeats: int
) -> Finding:
    """Compares all implementations, and times those that are right if there are turns to do so."""
    results: dict[str, Any] = {}
    reference = Reference.of(family, case)
    platform = platform_of(jax.devices()[0]) or "cpu"
    for implementation in NAMES[platform]:
        try:
            off = deviation(family, case, implementation, reference)
            results[implementation] = off._asdict() | {"right": off.right}
        except NotImplementedError as reason:
            results[implementation] = {"unsupported": str(reason)}
        except jax.errors.JaxRuntimeError as error:
            results[implementation] = {"right": False, "message": str(error).strip().partition("\n")[0]}
    right = [name for name, result in results.items() if result.get("right")]
    wrong = [name for name, result in results.items() if result.get("right") is False]
    data = {
        "operation": family.operation.name, "shape": shape, "dtype": dtype, "implementations": results,
        "positions": family.operation.positions(case.arrays),
    }  # fmt: skip
    why = lambda result: result.get("message") or f"{result['error']:.2g} off, not {result['allowed']:.2g}"
    text = [f"{name} {why(results[name])}" for name in wrong] + [f"{', '.join(right)} right"]
    data["taken"] = family.operation.explain(case.arrays, case.options, known(jax.devices()[0]))[platform]
    text.append(f"`load` takes {data['taken']}")
    if repeats and right:
        results = jax.eval_shape(functools.partial(family.operation.xla, **case.options), *case.arrays)
        floor = max(case.bytes(results) / hardware.bandwidth, case.flops / hardware.flops)
        for name, time in _times(family, case, right, repeats).items():
            results[name]["us"] = dataclasses.asdict(time.scaled(1e6))
            results[name]["share"] = floor / time.median
        taken = {name: results[name]["us"]["median"] for name in right}
        data["fastest"] = fastest = min(taken, key=taken.__getitem__)
        text.append(f"fastest {fastest}: " + ", ".join(f"{name} {us:.0f} us" for name, us in taken.items()))
    return Finding(title, "; ".join(text), not wrong, data)


def _times(family: Family, case: Operands, names: Sequence[str], repeats: int) -> dict[str, timing.Time]:
    """Seconds per call of each implementation, in turns."""
    ready: dict[str, Callable[[], Any]] = {}
    for name in names:
        # Arrays are arguments, not constants, or XLA would compute the result while it compiles.
        function = jax.jit(functools.partial(run, family, case, name))  # type: ignore[arg-type]
        ready[name] = functools.partial(timing.several, functools.partial(function, *case.arrays), CALLS)
        jax.block_until_ready(ready[name]())
    return {name: time.scaled(1 / CALLS) for name, time in timing.interleaved(ready, repeats).items()}


def derive_evidence(measured: Sequence[Finding], report: str) -> Evidence:
    """Derives evidence about this device: calls for which an implementation is correct and faster than XLA's.

    A measured shape speaks for calls of its operation and dtype up to its number of positions, down to the
    next smaller one that was measured; the largest one for all above it too. Where anything was wrong with an
    implementation of an operation, it is not set for any shape of it.

    Args:
      measured: Findings of `findings`.
      report: Source of the entries.
    """
    device = jax.devices()[0]
    timed = [f.data for f in measured if "fastest" in f.data]
    broken = {
        (f.data["operation"], name)
        for f in measured
        for name, result in f.data.get("implementations", {}).items()
        if result.get("right") is False
    }
    entries: list[Entry] = []
    for operation, dtype in dict.fromkeys((data["operation"], data["dtype"]) for data in timed):
        ours = [data for data in timed if (data["operation"], data["dtype"]) == (operation, dtype)]
        counts = sorted({data["positions"] for data in ours})
        bounds = zip((0, *counts), (*counts[:-1], 2**31 - 1), strict=False)
        for count, (below, most) in zip(counts, bounds, strict=True):
            best = _best([d["implementations"] for d in ours if d["positions"] == count], operation, broken)
            where = operation, platform_of(device) or "cpu", device.device_kind
            entries.append(Entry(*where, best, (dtype,), (below + 1, most), report))
    return tuple(entries)


def record(entries: Evidence, path: Path):
    """Writes entries in place of those that were recorded before, for `pallas_kernels.evidence`."""
    write_json(path, {"jax": jax.__version__, "entries": [dataclasses.asdict(entry) for entry in entries]})


def _best(measured: list[dict[str, Any]], operation: str, broken: set[tuple[str, str]]) -> Implementation:
    """Returns the implementation that is clearly faster than XLA's at all of these shapes, or XLA's."""

    def gain(name: str) -> float:
        both = [times for times in measured if "us" in times.get(name, {}) and "us" in times["xla"]]
        if not both or (operation, name) in broken:
            return 0.0
        return min(times["xla"]["us"]["median"] / times[name]["us"]["median"] for times in both)

    best = max(("pallas", "triton", "mosaic_gpu", "cudnn"), key=gain)
    return best if gain(best) >= MARGIN else "xla"
