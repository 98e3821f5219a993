"""Measures settings: their quality and cost, and how fast they are relative to the exact decoder.

Times are taken of a few settings at a time, interleaved with the exact decoder, so that other load slows all
of a turn alike. Each turn gives a ratio; the range of the ratios shows whether their median means anything.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from bench.policies.grid import EXACT, Setting, find, setting_of
from bench.policies.workloads import Workload
from bench.shared import device, runner

TOGETHER = 4  # settings that share the exact decoder's runs
SAVED = 16  # settings until results are written, for which the exact decoders run anew
PROGRAMS = 8  # settings until compiled programs are dropped: they use up the process's memory maps


@dataclasses.dataclass(frozen=True)
class Timing:
    """How settings are timed.

    Attributes:
      turns: timed runs of each setting.
      batch: prompts decoded together in a run, if the workload has as many.
    """

    turns: int = 5
    batch: int = 8

    def __post_init__(self):
        for name in ("turns", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def stages(
    workload: Workload, earlier: dict[str, Any], timing: Timing | None, saved: int = SAVED
) -> Iterator[dict[str, Any]]:
    """A workload's results, after every few settings have run and after they have been timed.

    Args:
      workload: what is measured.
      earlier: its results so far. Rows that they have of the same workload are not run again, nor timed if
        they have been; rows of settings that the grid does not have any more are left out.
      timing: how to time; None does not.
      saved: settings that run until there are results again.
    """
    about = workload.described
    same = all(earlier.get(key, "") == value for key, value in about.items() if key != "date")
    results: dict[str, Any] = earlier if same else about | {"rows": []}
    # by the curve too: with one block there is, "one block" is named like the rest
    rows = {setting: find(results, setting, curve=setting.curve) for setting in workload.grid}
    missing = [setting for setting, row in rows.items() if row is None]
    for start in range(0, len(missing), saved):
        rows |= measure(workload, missing[start : start + saved])
        done = min(start + saved, len(missing))
        print(f"{workload.name}: {done} of {len(missing)} settings run", file=sys.stderr)
        results = results | about | {"rows": [row for row in rows.values() if row is not None]}
        yield results
    if timing and any("speed_range" not in row for row in results["rows"]):
        yield time_the_rest(workload, results, timing)


def measure(workload: Workload, settings: list[Setting]) -> dict[Setting, dict[str, Any]]:
    """A row per setting, without times; the exact decoders that they are compared with run as well."""
    assert workload.grid[0] == EXACT
    outs: dict[Setting, dj.Output] = {}
    running = [EXACT, *(run for s in settings for run in (s.exact, s.unlabelled))]
    running = list(dict.fromkeys(running))
    for i, setting in enumerate(running):
        if i % PROGRAMS == 0:
            jax.clear_caches()
        parts = [workload.run(setting, prompts) for prompts in workload.chunks()]
        outs[setting] = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return {s: _row(workload, s, (outs[EXACT], outs[s.exact]), outs[s.unlabelled]) for s in settings}


def _row(workload: Workload, setting: Setting, exact: tuple[dj.Output, dj.Output], out: dj.Output) -> dict:
    """`exact` are the plain exact decoder, and the one with the setting's own sampler and schedule."""
    plain, base = exact
    responses = lambda out: out.tokens[:, workload.prompt.shape[1] :]
    pairs, size = _storage(workload, setting)
    return setting.named(workload.length, workload.block) | {
        "curve": setting.curve,
        **workload.scores(responses(out)),
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
    spec, block = workload.model.spec, setting.block(workload.length, workload.block)
    steps = workload.length // setting.divide_steps
    layout = dj.Layout(workload.prompt.shape[1], workload.length, block, steps, padded=False)
    made = jax.eval_shape(lambda: setting.policy.init(spec, layout, 1, jnp.float32))
    leaves = jax.tree_util.tree_leaves_with_path(made)
    keys = sum(leaf.size for path, leaf in leaves if getattr(path[-1], "name", "") == "k")
    size = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    return keys / (spec.layers * spec.kv_heads * spec.head), size


def retimed(workload: Workload, results: dict[str, Any], timing: Timing) -> dict[str, Any]:
    """A workload's results with new times; everything else stays.

    Rows get `tokens_per_s` (median), `speed_over_exact` (median of the turns' ratios) and `speed_range` (the
    smallest and the largest of them); `timed` says when and on what.
    """
    settings = [setting_of(row, workload.length, workload.block) for row in results["rows"]]
    unique = list(dict.fromkeys(settings))
    where = _where(workload, timing)
    speeds: dict[Setting, dict[str, Any]] = {}
    for start in range(0, len(unique), TOGETHER):
        if start and start % PROGRAMS == 0:
            jax.clear_caches()
        speeds |= _speeds(workload, unique[start : start + TOGETHER], timing)
        print(f"{workload.name}: {len(speeds)} of {len(unique)} settings timed", file=sys.stderr)
    rows = [row | speeds[setting] for row, setting in zip(results["rows"], settings, strict=True)]
    kept = {key: value for key, value in results.items() if key != "timed_later"}
    return kept | {"timed": where, "rows": rows}


def time_the_rest(workload: Workload, results: dict[str, Any], timing: Timing) -> dict[str, Any]:
    """A workload's results with times for the rows that have none.

    `timed` remains about the rows that it was about; `timed_later` is about the others, with their count.
    """
    rest = [row for row in results["rows"] if "speed_range" not in row]
    timed = retimed(workload, {"rows": rest}, timing)
    new = iter(timed["rows"])
    rows = [row if "speed_range" in row else next(new) for row in results["rows"]]
    if "timed" not in results:
        return results | {"timed": timed["timed"], "rows": rows}
    later = [*results.get("timed_later", ()), timed["timed"] | {"settings": len(rest)}]
    return results | {"timed_later": later, "rows": rows}


def _where(workload: Workload, timing: Timing) -> dict[str, Any]:
    return runner.provenance("float32") | {
        "load_before": round(os.getloadavg()[0], 2),
        "turns": timing.turns,
        "batch": len(workload.prompt[: timing.batch]),
    }


def _speeds(workload: Workload, settings: list[Setting], timing: Timing) -> dict[Setting, dict[str, Any]]:
    prompts = slice(timing.batch)
    runs = {str(i): functools.partial(workload.run, s, prompts) for i, s in enumerate(settings)}
    runs["exact"] = functools.partial(workload.run, EXACT, prompts)
    for run in runs.values():
        run()  # compiles
    times = device.interleaved(runs, timing.turns)
    found = {}
    for i, setting in enumerate(settings):
        ratio = times["exact"].over(times[str(i)])
        found[setting] = {
            "tokens_per_s": len(workload.prompt[prompts]) * workload.length / times[str(i)].median,
            "speed_over_exact": ratio.median,
            "speed_range": [ratio.low, ratio.high],
        }
    return found
