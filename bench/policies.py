"""Quality, cost and speed of every cache policy over a grid of its settings.

    python -m bench.policies --json bench/results/policies_cpu.json
    python -m bench.policies --retime bench/results/policies_cpu.json --only chain random

The embedded models' tasks (accuracy on held-out prompts) and random weights of LLaDA's architecture
(agreement with the exact decoder). An interrupted run resumes with what the file lacks.
Only the times depend on what else the machine does: `--retime` measures those again, on an idle machine, and
leaves everything else as it is.
"""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import tyro

import dllm_jax as dj
from bench import report
from bench.policies_grid import EXACT, Setting
from bench.policies_rows import named
from bench.policies_speed import PROGRAMS, Timing, retimed
from bench.policies_workloads import Workload, workloads


def measure(workload: Workload) -> list[dict[str, Any]]:
    """One row per setting, without times; the first one is the exact decoder."""
    assert workload.grid[0] == EXACT
    outs = []
    for i, setting in enumerate(workload.grid):
        if i % PROGRAMS == 0:
            jax.clear_caches()
        parts = [workload.run(setting, prompt) for prompt in workload.chunks()]
        outs.append(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts))
        print(f"{workload.name}: {i + 1} of {len(workload.grid)} settings run", flush=True)
    pairs = list(zip(workload.grid, outs, strict=True))
    base = {setting.exact: out for setting, out in pairs if setting.policy == EXACT.policy}
    return [_row(workload, setting, (outs[0], base[setting.exact]), out) for setting, out in pairs]


def _row(workload: Workload, setting: Setting, exact: tuple[dj.Output, dj.Output], out: dj.Output) -> dict:
    """`exact` are the plain exact decoder, and the one with the setting's own sampler and schedule."""
    plain, base = exact
    responses = lambda out: out.tokens[:, workload.prompt.shape[1] :]
    pairs, size = _storage(workload, setting)
    return named(setting, workload.length, workload.block) | {
        "curve": setting.curve,
        "accuracy": workload.accuracy(responses(out)),
        "agreement": float(np.mean(responses(base) == responses(out))),
        "forwards": float(np.mean(out.stats.nfe)),
        "computed": float(
            (np.sum(out.stats.computed) + np.sum(out.stats.widened)) / np.sum(plain.stats.computed)
        ),
        "kept_pairs": pairs,
        "cache_bytes": size,
    }


def _storage(workload: Workload, setting: Setting) -> tuple[float, int]:
    """K/V pairs per layer and kv head, and bytes of the whole cache, both per prompt."""
    spec, block = workload.model.spec, workload.length if setting.whole else workload.block
    steps = workload.length // setting.divide_steps
    layout = dj.Layout(workload.prompt.shape[1], workload.length, block, steps, padded=False)
    made = jax.eval_shape(lambda: setting.policy.init(spec, layout, 1, jnp.float32))
    leaves = jax.tree_util.tree_leaves_with_path(made)
    keys = sum(leaf.size for path, leaf in leaves if getattr(path[-1], "name", "") == "k")
    size = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    return keys / (spec.layers * spec.kv_heads * spec.head), size


def _print(name: str, results: dict[str, Any]):
    rows = results["rows"]
    table = rich.table.Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    rich.console.Console(width=220).print(table)


def _chosen(only: tuple[str, ...], names: Iterable[str]) -> list[str]:
    """The workloads that `only` names, by their whole names or by a word of them; all if it is empty."""
    names = list(names)
    known = {word for name in names for word in (name, *name.split())}
    if unknown := sorted(set(only) - known):
        raise SystemExit(f"--only {' '.join(unknown)}: not among {', '.join(names)}")
    return [name for name in names if not only or {name, *name.split()} & set(only)]


def _run(only: tuple[str, ...], prompts: int, width: int, timing: Timing, json_file: Path | None):
    """Measures what the file does not have; runs of different workloads may share it."""
    where = report.provenance("float32") | {"dllm_jax": version("dllm-jax")}
    every = workloads(prompts, width)
    for name in _chosen(only, every):
        found = report.read(json_file).get("models", {})
        for done in stages(every[name](), found.get(name, {}), timing):
            found |= {name: done}
            report.write(json_file, where, models={key: found[key] for key in every if key in found})
        _print(name, found[name])


def stages(workload: Workload, earlier: dict[str, Any], timing: Timing) -> Iterator[dict[str, Any]]:
    """A workload's results without times, then with them; what `earlier` has of the same is not run again."""
    results, about = earlier, workload.described
    if any(earlier.get(key, "") != value for key, value in about.items() if key != "date"):
        results = about | {"rows": measure(workload)}
        yield results
    if "timed" not in results:
        yield retimed(workload, results, timing)


def retime(path: Path, only: tuple[str, ...], timing: Timing):
    """Measures speed again, workload by workload; the file is rewritten after each.

    Raises:
      SystemExit: no such file, or its results are of another checkpoint than the one that is here.
    """
    if not path.is_file():
        raise SystemExit(f"--retime {path}: no such file")
    found = report.read(path)
    for name in _chosen(only, found["models"]):
        results = found["models"][name]
        workload = workloads(timing.batch, results["width"])[name]()
        if workload.sha256 != results["model_sha256"]:
            raise SystemExit(f"{path} has {name} of another checkpoint: run it anew, without --retime")
        found["models"][name] = retimed(workload, results, timing)
        report.write(path, found)
        _print(name, found["models"][name])


def main(
    only: tuple[str, ...] = (),
    prompts: int = 256,
    width: int = 256,
    timing: Annotated[Timing, tyro.conf.arg(name="")] = Timing(),  # noqa: B008 (frozen)
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    again: Annotated[Path | None, tyro.conf.arg(name="retime", metavar="RESULTS")] = None,
):
    """Runs the grids and prints a table per workload.

    Args:
      only: workloads, e.g. "tiny-llada chain", or words of their names, e.g. chain; all by default.
      prompts: held-out prompts of each task.
      width: of the random model.
      timing: how often settings are timed, and on how many prompts.
      json_file: results go here; what it has of the same workloads is not run again.
      again: measure only the speed again, of the settings in these results, and rewrite it there.
    """
    if again is not None:
        retime(again, only, timing)
    else:
        _run(only, prompts, width, timing, json_file)


if __name__ == "__main__":
    tyro.cli(main)
