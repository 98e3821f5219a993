"""Compiles whole generations, and the training step, for accelerators that are not there.

    python -m bench.compiled h100 --policy DualCache MaskKV --json FILE
    ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu python -m bench.compiled v6e --layers 2 --hlo DIRECTORY
    python -m bench.compiled v5e --tp 4 --policy Policy training

Needs the compilers (`targets.py`), not the hardware. A row per policy: whether it compiles, the compiler's
CPU seconds, bytes of arguments, temporaries and peak per chip, collectives per layer, copies of at
least 1 MiB, and the bytes of a reuse step, of the step that enters a block of a block-causal model, and of a
full step over the roofline's. Bytes are counted in the
program (`bench/compiled/traffic.py`); loops whose trips depend on the data are counted once. Of TPUs there
are also the cycles that the compiler expects, added up as if nothing overlapped; what it says nothing of,
gathers and scatters, counts nothing. Every row has a process of its own: a compiler that fails may end it.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.compiled.program import TRAINING, Case, Setting, compile_case
from bench.compiled.targets import TARGETS
from bench.shared import runner
from bench.shared.models import policies_named, shape
from dllm_jax.command_line import run
from dllm_jax.provenance import measured_on

Targets = Annotated[tuple[str, ...], tyro.conf.Positional]


@dataclasses.dataclass(frozen=True)
class Options(Setting):
    """Options of the compilation, in addition to `bench.compiled.program.Setting`.

    Attributes:
      targets: Keys of `bench.compiled.targets.TARGETS`.
      policy: Class names of policies, constructor calls, or "training". Default: all of `policies.ALL` that
        support the model.
      hlo: Directory for the optimized programs, POLICY-TARGET.hlo.
      json: File of the results.
    """

    targets: Targets
    policy: tuple[str, ...] = ()
    hlo: Path | None = None
    json: runner.JsonFile = None

    def __post_init__(self):
        if unknown := sorted(set(self.targets) - set(TARGETS)):
            raise ValueError(f"targets {', '.join(unknown)} are not among {', '.join(TARGETS)}")

    def cases(self) -> Iterator[Case]:
        """Every policy for every target.

        Raises:
          ValueError: no target.
        """
        if not self.targets:
            raise ValueError(f"no target: name some of {', '.join(TARGETS)}")
        named = [name for name in self.policy if name != TRAINING]
        policies_named(named)  # what is no policy is refused before anything is compiled
        every = [type(policy).__name__ for policy in policies_named((), shape(self.shape))]
        chosen = (named if self.policy else every) + [TRAINING] * (TRAINING in self.policy)
        same = {field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)}
        for target in self.targets:
            for policy in chosen:
                yield Case(target, policy, **same)


def compiled(case: Case, hlo: Path | None) -> runner.Row:
    """A row of results, made in a new process; what goes wrong there is in "error"."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            row, program = pool.submit(compile_case, case).result()
        except BrokenProcessPool:
            return dataclasses.asdict(case) | {"error": "the compiler ended the process"}
        except Exception as error:  # the compilers' messages are the result
            return dataclasses.asdict(case) | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if hlo is not None:
        hlo.mkdir(parents=True, exist_ok=True)
        (hlo / f"{re.sub(r'[^A-Za-z0-9]+', '_', case.policy)}-{case.target}.hlo").write_text(program)
    return row


def provenance(dtype: str) -> runner.Row:
    """With what results were made: versions, date, and the commit that is compiled (None outside a clone)."""
    command, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    process = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    made = {"device": "none: described targets", "commit": process.stdout.strip() or None}
    return measured_on(dtype) | made


def _step(kind: str, field: str, scale: float = 1) -> Any:
    def cell(row: runner.Row) -> str:
        step = row.get(f"{kind}_step")
        return f"{step[field] * scale:.3g}" if step else row.get("error", "-")

    return cell


def _copied(where: str) -> Any:
    size = lambda copies: f" ({sum(c['bytes'] for c in copies) / 1e6:.0f} MB)"
    return lambda row: f"{len(row[where])}" + (size(row[where]) if row[where] else "")


COLUMNS: runner.Columns = {
    "policy": lambda row: row["policy"],
    "target": lambda row: row["target"] + f" x {row['tp'] * row['dp']}" * (row["tp"] * row["dp"] > 1),
    "CPU s": lambda row: row["compile_cpu_s"],
    "peak, GB": lambda row: f"{row['peak'] / 1e9:.1f}" + ("" if row["fits"] else " (does not fit)"),
    "temporary, GB": lambda row: f"{row['temporaries'] / 1e9:.2f}",
    "reuse step, GB": _step("reuse", "bytes", 1e-9),
    "over roofline": _step("reuse", "ratio"),
    "beyond L2": _step("reuse", "ratio_beyond_cache"),
    "entering step, GB": _step("enter", "bytes", 1e-9),
    "over roofline  ": _step("enter", "ratio"),
    "full step, GB": _step("full", "bytes", 1e-9),
    "over roofline ": _step("full", "ratio"),
    "beyond L2 ": _step("full", "ratio_beyond_cache"),
    "reuse step, M cycles": _step("reuse", "estimated_cycles", 1e-6),
    "full step, M cycles": _step("full", "estimated_cycles", 1e-6),
    "collectives per layer": _step("full", "collectives_per_layer"),
    "copies in loops": _copied("loop_copies"),
    "at entry": _copied("entry_copies"),
}


def main(options: Annotated[Options, tyro.conf.arg(name="")]):
    """Compiles and prints."""
    where = provenance(options.dtype)
    rows = (compiled(case, options.hlo) for case in options.cases())
    runner.run(rows, COLUMNS, options.json, lambda rows: where | {"rows": rows})


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
