"""Quality, cost and speed of every cache policy over a grid of its settings.

    python -m bench.policies --json bench/results/policies_cpu.json
    python -m bench.policies --retime bench/results/policies_cpu.json --only chain random

The embedded models' tasks (accuracy on held-out prompts) and random weights of LLaDA's architecture
(agreement with the exact decoder). An interrupted run, or one after the grid has grown, measures only what
the file lacks.
Only the times depend on what else the machine does: `--retime` measures those again, on an idle machine, and
leaves everything else as it is.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import tyro

from bench.policies import plots
from bench.policies.measure import Timing, retimed, stages
from bench.policies.workloads import workloads
from bench.shared import runner


def _chosen(only: tuple[str, ...], names: Iterable[str]) -> list[str]:
    """The workloads that `only` names, by their whole names or by a word of them; all if it is empty."""
    names = list(names)
    known = {word for name in names for word in (name, *name.split())}
    if unknown := sorted(set(only) - known):
        raise SystemExit(f"--only {' '.join(unknown)}: not among {', '.join(names)}")
    return [name for name in names if not only or {name, *name.split()} & set(only)]


def _run(only: tuple[str, ...], prompts: int, width: int, timing: Timing | None, path: Path | None):
    """Measures what the file does not have; runs of different workloads may share it."""
    where = runner.provenance("float32")
    every = workloads(prompts, width)
    for name in _chosen(only, every):
        found = runner.read(path, {}).get("models", {})
        for done in stages(every[name](), found.get(name, {}), timing):
            found |= {name: done}
            runner.write(path, where | {"models": {key: found[key] for key in every if key in found}})
        print(f"\n{name}\n\n{plots.table(found[name])}")


def retime(path: Path, only: tuple[str, ...], timing: Timing):
    """Measures speed again, workload by workload; the file is rewritten after each.

    Raises:
      SystemExit: no such file, or its results are of another checkpoint than the one that is here.
    """
    results = runner.read(path, None)
    if results is None:
        raise SystemExit(f"--retime {path}: no such file")
    found = results["models"]
    for name in _chosen(only, found):
        workload = workloads(timing.batch, found[name]["width"])[name]()
        if workload.sha256 != found[name]["model_sha256"]:
            raise SystemExit(f"{path} has {name} of another checkpoint: run it anew, without --retime")
        found[name] = retimed(workload, found[name], timing)
        runner.write(path, results)
        print(f"\n{name}\n\n{plots.table(found[name])}")


def main(
    only: tuple[str, ...] = (),
    prompts: int = 256,
    width: int = 256,
    timing: Annotated[Timing, tyro.conf.arg(name="")] = Timing(),  # noqa: B008 (frozen)
    json: runner.JsonFile = None,
    again: Annotated[Path | None, tyro.conf.arg(name="retime", metavar="RESULTS")] = None,
    speed: bool = True,
):
    """Runs the grids and prints a table per workload.

    Args:
      only: workloads, e.g. "tiny-llada chain", or words of their names, e.g. chain; all by default.
      prompts: held-out prompts of each task.
      width: of the random model.
      timing: how often settings are timed, and on how many prompts.
      json: results go here; settings that it has of the same workloads are not run again.
      again: measure only the speed again, of the settings in these results, and rewrite it there.
      speed: time the settings too, which takes an idle machine; `--retime` can do so later.
    """
    if again is not None:
        retime(again, only, timing)
    else:
        _run(only, prompts, width, timing if speed else None, json)


if __name__ == "__main__":
    tyro.cli(main)
