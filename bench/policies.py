"""Quality and cost of every cache policy over a grid of its settings, all in one run.

    python -m bench.policies --json bench/results/policies_cpu.json

The embedded models' tasks (accuracy on held-out prompts) and random weights of LLaDA's architecture
(agreement with the exact decoder). The exact decoder is timed before every setting, and a setting's speed is
its ratio to the median of the five of these runs nearest in time: on a shared machine only that means
anything. An interrupted run goes on with the first workload that the file does not have.
"""

import json
import time
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
from bench.policies_workloads import Workload, workloads
from dllm_jax.expressions import call

NEAREST = 5
PROGRAMS = 16  # settings until compiled programs are dropped: they use up the process's memory maps


def measure(workload: Workload, repeats: int) -> list[dict[str, Any]]:
    """One row per setting; the first one is the exact decoder."""
    assert workload.grid[0] == EXACT
    first = workload.chunks()[0]
    outs, seconds, exacts = [], [], []
    for i, setting in enumerate(workload.grid):
        if i % PROGRAMS == 0:
            jax.clear_caches()
            workload.run(EXACT, first)  # compiles
        exacts.append(_run(workload, EXACT, first)[1])
        out, taken = _everything(workload, setting, repeats)
        outs.append(out)
        seconds.append(taken)
        where = f"{workload.name}, {i + 1} of {len(workload.grid)}"
        print(f"{where}: {call(setting.policy)}, {call(setting.sampler)}: {taken:.3f} s", flush=True)
    base = {
        setting.exact: out
        for setting, out in zip(workload.grid, outs, strict=True)
        if setting.policy == EXACT.policy
    }
    rows = []
    for i, (setting, out) in enumerate(zip(workload.grid, outs, strict=True)):
        start = min(max(i - NEAREST // 2, 0), max(len(exacts) - NEAREST, 0))
        exact = float(np.median(exacts[start : start + NEAREST]))
        row = _row(workload, setting, (outs[0], base[setting.exact]), out)
        tokens = workload.length * len(first)
        rows.append(row | {"tokens_per_s": tokens / seconds[i], "speed_over_exact": exact / seconds[i]})
    return rows


def _run(workload: Workload, setting: Setting, prompt: np.ndarray) -> tuple[dj.Output, float]:
    start = time.perf_counter()
    out = workload.run(setting, prompt)
    return out, time.perf_counter() - start


def _everything(workload: Workload, setting: Setting, repeats: int) -> tuple[dj.Output, float]:
    """All prompts, chunk by chunk, and the median seconds of a chunk.

    The first run compiles and does not count; where there are few chunks the first is run again.
    """
    chunks = workload.chunks()
    runs = [_run(workload, setting, prompt) for prompt in chunks]
    times = [seconds for _, seconds in runs[1:]]
    times += [_run(workload, setting, chunks[0])[1] for _ in range(repeats - len(times))]
    outs = [out for out, _ in runs]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outs), float(np.median(times))


def _row(workload: Workload, setting: Setting, exact: tuple[dj.Output, dj.Output], out: dj.Output) -> dict:
    """`exact` are the plain exact decoder, and the one with the setting's own sampler and schedule."""
    plain, base = exact
    responses = lambda out: out.tokens[:, workload.prompt.shape[1] :]
    pairs, size = _storage(workload, setting)
    return {
        "policy": call(setting.policy),
        "curve": setting.curve,
        "sampler": call(setting.sampler),
        "steps": workload.length // setting.divide_steps,
        "block": workload.length if setting.whole else workload.block,
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


def _print(console: rich.console.Console, name: str, rows: list[dict[str, Any]], where: dict):
    table = rich.table.Table(*rows[0], title=f"{name}, {where}")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def _measured(json_file: Path | None) -> dict[str, Any]:
    """Workloads that the file has; runs of different ones may share it."""
    if json_file is None or not json_file.exists():
        return {}
    return json.loads(json_file.read_text())["models"]


def main(
    only: tuple[str, ...] = (),
    prompts: int = 256,
    width: int = 256,
    repeats: int = 5,
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
):
    """Runs the grids and prints a table per workload.

    Args:
      only: names of workloads, e.g. "tiny-llada chain"; all by default.
      prompts: held-out prompts of each task.
      width: of the random model.
      repeats: timed runs of each setting at least, of which the median counts.
      json_file: results go here; workloads that it has of the same models are not run again.
    """
    where = report.provenance("float32") | {"dllm_jax": version("dllm-jax")}
    console, found = rich.console.Console(width=220), _measured(json_file)
    every = workloads(prompts, width)
    for name in only or every:
        if name not in every:
            raise SystemExit(f"only={name!r} is not one of {', '.join(every)}")
        workload = every[name]()
        if found.get(name, {}).get("model_sha256", "") != workload.sha256:
            rows = measure(workload, repeats)
            found = _measured(json_file) | {name: {**workload.described, "rows": rows}}
            if json_file is not None:
                report.write(json_file, where, models={key: found[key] for key in every if key in found})
        _print(console, name, found[name]["rows"], where)


if __name__ == "__main__":
    tyro.cli(main)
