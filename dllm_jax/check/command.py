"""`dllm-jax check`: runs the parts of the report, one after another."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

import jax
import rich.console
import tyro

import dllm_jax as dj
from dllm_jax.check import environment, operations, peers, several, speed, timing, tokens
from dllm_jax.check.report import Findings, Report
from dllm_jax.check.weights import default_dtype
from dllm_jax.checkpoint.source import open_checkpoint
from dllm_jax.options import Options, PositiveFloat
from dllm_jax.provenance import device, measured_on, now
from pallas_kernels.choice import NAMES, Implementation
from pallas_kernels.evidence import known, platform_of, user_file
from pallas_kernels.operands import FAMILIES

CheckPart = Literal["environment", "operations", "tokens", "speed", "several"]


@dataclasses.dataclass(frozen=True)
class CheckArguments(Options):
    """Options of `dllm-jax check`."""

    shape: str | None = None
    """Model shape to benchmark with random weights: a published model such as llada-8b or dream-7b,
    a bundled one or the path of a checkpoint. Default: llada-8b, or tiny-llada on CPUs."""
    quick: bool = False
    """Run a short check: one bundled model, small operands, a few policies."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of the report as JSON. Default: no file."""
    record: bool = False
    """Store the fastest implementations, which `load` then uses on this machine."""
    minutes: PositiveFloat = 8
    """Time limit of the speed part, in minutes; the correctness parts always finish."""
    peers: bool = False
    """Also time the reference implementations in torch, which must be installed; needs a clone."""
    parts: Annotated[tuple[CheckPart, ...], tyro.conf.arg(metavar="PART...")] = get_args(CheckPart)
    """Parts of the report to run."""

    def __post_init__(self):
        super().__post_init__()
        if self.record and "operations" not in self.parts:
            raise ValueError(
                f"record=True with parts={self.parts} would drop what was recorded: the part operations "
                "measures it. Add it, or leave --record out."
            )


def main(arguments: Annotated[CheckArguments, tyro.conf.arg(name="")]) -> int:
    """Checks correctness and speed of dllm_jax on this machine's device, and finds the fastest kernels.

    Works offline. Prints a line per check, then a verdict. The exit code is 0 only if every check passes.
    Ctrl-C leaves a valid report.
    """
    return run_checks(arguments, rich.console.Console())


def run_checks(arguments: CheckArguments, console: rich.console.Console) -> int:
    """Runs the parts that are asked for and prints the verdict.

    Raises:
      ValueError, OSError: an unknown shape, or a file that cannot be written; before anything is measured.
    """
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    beside = Report({})
    if arguments.peers:  # before jax holds the memory of the device
        peers.check_installed()
        beside.run("peers", lambda: peers.peer_findings(arguments.shape), say)
    until = time.monotonic() + 60 * arguments.minutes
    spec = timed_spec(arguments.shape)
    dtype = default_dtype(device().platform)
    asked = dataclasses.asdict(arguments) | {"json": None}
    report = Report(measured_on(dtype) | {"asked": asked}, arguments.json)
    report.write()  # a path that cannot be is refused before the work
    report.parts.update(beside.parts)
    parts = _parts(arguments, spec, dtype, until)
    try:
        for name in arguments.parts:
            report.run(name, parts[name], say)
        report.complete = True
    except KeyboardInterrupt:
        say("interrupted")
    if arguments.record and report.complete:
        name = f"dllm-jax check, {now()}"
        evidence = operations.derive_evidence(report.parts.get("operations", []), name)
        operations.record(evidence, user_file())
        say(f"recorded for this machine: {len(evidence)} entries in {user_file()}")
    report.write()
    console.rule()
    for line in report.verdict():
        say(line)
    return 0 if report.complete and not report.wrong else 1


def timed_spec(name: str | None) -> dj.ModelSpec:
    """The spec to time, by the name of a model or a checkpoint's path.

    Raises:
      FileNotFoundError, ValueError: no such model.
    """
    name = name or ("tiny-llada" if device().platform == "cpu" else "llada-8b")
    if name in dj.presets.names("models"):
        return dj.presets.model_spec(name)
    return open_checkpoint(dj.bundled.path(name) if name in dj.bundled.NAMES else name).spec


def _parts(
    arguments: CheckArguments, spec: dj.ModelSpec, dtype: str, until: float
) -> dict[CheckPart, Callable[[], Findings]]:
    """Makes the function of each part; rates are measured when the first one needs them."""
    here, quick = jax.devices()[0], arguments.quick
    on_cpu = here.platform == "cpu"
    hardware = functools.cache(lambda: timing.ceilings(dtype))
    dtypes = ("float32",) if on_cpu and quick else ("float32", "bfloat16")
    geometry = speed.SMALL if on_cpu else speed.Geometry()
    bundled_models = dj.bundled.TEXT[:1] if quick else dj.bundled.TEXT
    policies = speed.POLICIES[:3] if quick else dj.policies.ALL
    every = () if on_cpu else NAMES[platform_of(here) or "cpu"]
    by: list[Implementation] = [name for name in every if name == "xla" or _takes(name, dtype)]
    cases = speed.cases(geometry, by, quick, spec)
    return {
        "environment": lambda: environment.environment_findings(spec, hardware()),
        "operations": lambda: operations.operation_findings(hardware(), dtypes, quick),
        "tokens": lambda: tokens.token_findings(here, _reference(), bundled_models, dtypes, policies),
        "speed": lambda: speed.speed_findings(spec, dtype, hardware(), geometry, cases, known(here), until),
        "several": lambda: several.device_findings(spec, dtype, geometry),
    }


def _takes(implementation: Implementation, dtype: str) -> bool:
    """Whether attention has the implementation on this platform, for some shape of a model."""
    family = next(family for family in FAMILIES if family.operation.name == "attention")
    platform = platform_of(jax.devices()[0])
    make = lambda shape: jax.eval_shape(lambda: family.make(shape, dtype).arrays)
    return platform is not None and any(
        family.operation.unsupported(platform, make(shape), {}, implementation) is None
        for shape in family.models.values()
    )


def _reference() -> jax.Device:
    """A CPU of this process.

    Raises:
      RuntimeError: jax was told to leave the CPU out.
    """
    try:
        return jax.devices("cpu")[0]
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        raise RuntimeError(f"no CPU to compare with (JAX_PLATFORMS={platforms}): unset it") from error
