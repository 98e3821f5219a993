"""How fast the settings of bench.policies are, relative to the exact decoder.

A few settings at a time are interleaved with the exact decoder, so that other load slows all of a turn alike.
Each turn gives a ratio; the range of the ratios shows whether their median means anything.
"""

import dataclasses
import functools
import os
from importlib.metadata import version
from typing import Any

import jax

from bench.policies.grid import EXACT, Setting
from bench.policies.rows import read
from bench.policies.workloads import Workload
from bench.shared import device, report

TOGETHER = 4  # settings that share the exact decoder's runs
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


def retimed(workload: Workload, results: dict[str, Any], timing: Timing) -> dict[str, Any]:
    """A workload's results with new times; everything else stays.

    Rows get `tokens_per_s` (median), `speed_over_exact` (median of the turns' ratios) and `speed_range` (the
    smallest and the largest of them); `timed` says when and on what.
    """
    settings = [read(row, workload.length) for row in results["rows"]]
    unique = list(dict.fromkeys(settings))
    where = _where(workload, timing)
    speeds: dict[Setting, dict[str, Any]] = {}
    for start in range(0, len(unique), TOGETHER):
        if start and start % PROGRAMS == 0:
            jax.clear_caches()
        speeds |= _speeds(workload, unique[start : start + TOGETHER], timing)
        print(f"{workload.name}: {len(speeds)} of {len(unique)} settings timed", flush=True)
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
    return report.provenance("float32") | {
        "dllm_jax": version("dllm-jax"),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "turns": timing.turns,
        "batch": len(workload.prompt[: timing.batch]),
    }


def _speeds(workload: Workload, settings: list[Setting], timing: Timing) -> dict[Setting, dict[str, Any]]:
    prompt = workload.prompt[: timing.batch]
    runs = {str(i): functools.partial(workload.run, s, prompt) for i, s in enumerate(settings)}
    runs["exact"] = functools.partial(workload.run, EXACT, prompt)
    for run in runs.values():
        run()  # compiles
    times = device.interleaved(runs, timing.turns)
    found = {}
    for i, setting in enumerate(settings):
        ratio = times["exact"].over(times[str(i)])
        found[setting] = {
            "tokens_per_s": len(prompt) * workload.length / times[str(i)].median,
            "speed_over_exact": ratio.median,
            "speed_range": [ratio.low, ratio.high],
        }
    return found
