"""Times every operation of `pallas_kernels`, each implementation: microseconds, GB/s, TFLOP/s, ratio to XLA.

    python -m bench.kernels --out bench/results/kernels_h100.json
    python -m bench.kernels --small --operations topk_evict --most 1      (on a CPU)

Uses the shapes of real models, or with --small those of the tests. A CPU needs --small: it interprets
"pallas", whose time there says nothing about the kernel. Bytes are the fewest that must be read and written.
Implementations are interleaved.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro

from bench.kernels.cases import FAMILIES, Family, Operands
from bench.shared import device, runner
from dllm_jax.roofline import Hardware

IMPLEMENTATIONS = ("xla", "pallas", "cudnn")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      operations: names; all if empty.
      implementations: "xla", "pallas", "cudnn".
      small: the small shapes of the tests.
      most: number of shapes per operation, all if not given.
      dtype: bfloat16 on accelerators and float32 on CPUs if not given.
      repeats: timed runs, of which the median counts.
      calls: calls per timed run; 20 on accelerators and 1 on CPUs if not given.
      json: results go here.
    """

    operations: tuple[str, ...] = ()
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    small: bool = False
    most: int | None = None
    dtype: str | None = None
    repeats: int = 7
    calls: int | None = None
    json: runner.JsonFile = None

    @property
    def per_run(self) -> int:
        """Calls per timed run."""
        return self.calls or (1 if jax.devices()[0].platform == "cpu" else 20)

    def chosen(self) -> list[Family]:
        """The operations.

        Raises:
          ValueError: unknown name.
        """
        names = [family.operation.name for family in FAMILIES]
        unknown = set(self.operations) - set(names) | set(self.implementations) - set(IMPLEMENTATIONS)
        if unknown:
            raise ValueError(f"{unknown} are not among {', '.join((*names, *IMPLEMENTATIONS))}")
        return [f for f in FAMILIES if f.operation.name in self.operations or not self.operations]


def function(family: Family, implementation: str, case: Operands) -> Callable[..., Any]:
    """The jitted implementation.

    Raises:
      NotImplementedError: there is no such implementation for these operands, and why.
    """
    if implementation != "xla":  # where the call is not supported, XLA's form would be taken, silently
        platform = {"gpu": "cuda"}.get(jax.devices()[0].platform, jax.devices()[0].platform)
        of, call = family.operation, (case.arrays, case.options)
        if reason := of.unsupported(platform, *call, implementation):  # type: ignore[arg-type]
            raise NotImplementedError(reason)
    choose = lambda *arrays: family.operation.run(arrays, case.options, implementation)  # type: ignore[arg-type]
    return jax.jit(choose)


def measure(options: Options, dtype: str, roof: Hardware) -> Iterator[dict[str, Any]]:
    """One row per operation, shape and implementation."""
    for family in options.chosen():
        for name, shape in list(family.shapes(options.small))[: options.most]:
            case = family.make(shape, jnp.dtype(dtype))
            about = {"operation": family.operation.name, "shape": name}
            serving = {}
            for implementation in options.implementations:
                try:
                    serving[implementation] = _compiled(function(family, implementation, case), case)
                except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
                    text = str(error).strip() or type(error).__name__
                    yield about | {"implementation": implementation, "error": text.splitlines()[0]}
            yield from rows(about, case, serving, options, roof)
            del case, serving
            jax.clear_caches()


def _compiled(run: Callable[..., Any], case: Operands) -> Callable[[], Any]:
    compiled = functools.partial(run.lower(*case.arrays).compile(), *case.arrays)  # type: ignore[attr-defined]
    jax.block_until_ready(compiled())
    return compiled


def rows(
    about: runner.Row, case: Operands, serving: dict[str, Callable[[], Any]], options: Options, roof: Hardware
) -> Iterator[runner.Row]:
    """Interleaved times of one shape's implementations."""
    calls = options.per_run
    repeated = {name: functools.partial(device.several, run, calls) for name, run in serving.items()}
    interleaved = device.interleaved(repeated, options.repeats)
    times = {name: time.scaled(1 / calls) for name, time in interleaved.items()}
    for name, time in times.items():
        moved, took = case.bytes(serving[name]()), time.median
        yield about | {
            "implementation": name, "us": dataclasses.asdict(time.scaled(1e6)),
            "gb_per_s": moved / took / 1e9, "tflop_per_s": case.flops / took / 1e12,
            "over_xla": times["xla"].median / took if "xla" in times else None,
            "share_of_roofline": max(moved / roof.bandwidth, case.flops / roof.flops) / took,
        }  # fmt: skip


COLUMNS: runner.Columns = {
    "operation": lambda row: row["operation"],
    "shape": lambda row: row["shape"],
    "implementation": lambda row: row["implementation"],
    "us": lambda row: f"{row['us']['median']:.1f}",
    "GB/s": lambda row: f"{row['gb_per_s']:.1f}",
    "TFLOP/s": lambda row: f"{row['tflop_per_s']:.2f}",
    "over XLA": lambda row: "-" if row["over_xla"] is None else f"{row['over_xla']:.2f}x",
}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Measures the operations."""
    dtype = options.dtype or runner.default_dtype()
    if jax.devices()[0].platform == "cpu" and not options.small:
        raise SystemExit("A CPU interprets the kernels: pass --small, the models' shapes would take hours.")
    roof = device.ceilings(dtype, **({"megabytes": 64, "side": 512} if options.small else {}))
    where = runner.provenance(dtype) | {"ceilings": dataclasses.asdict(roof), "calls": options.per_run}
    runner.run(measure(options, dtype, roof), COLUMNS, options.json, lambda rows: where | {"rows": rows})


if __name__ == "__main__":
    tyro.cli(main)
