"""Measures what the results of bench.policies lack: settings, and their times."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from bench.policies.grid import EXACT, Setting
from bench.policies.rows import find, named
from bench.policies.speed import PROGRAMS, Timing, time_the_rest
from bench.policies.workloads import Workload


def stages(workload: Workload, earlier: dict[str, Any], timing: Timing | None) -> Iterator[dict[str, Any]]:
    """A workload's results, after its settings have run and after they have been timed.

    Args:
      workload: what is measured.
      earlier: its results so far. Rows that they have of the same workload are not run again, nor timed if
        they have been; rows of settings that the grid does not have any more are left out.
      timing: how to time; None does not.
    """
    about = workload.described
    same = all(earlier.get(key, "") == value for key, value in about.items() if key != "date")
    results: dict[str, Any] = earlier if same else about | {"rows": []}
    # by the curve too: with one block there is, "one block" is named like the rest
    rows = {setting: find(results, setting, curve=setting.curve) for setting in workload.grid}
    if missing := [setting for setting, row in rows.items() if row is None]:
        rows |= measure(workload, missing)
        results = results | about | {"rows": list(rows.values())}
        yield results
    if timing and any("speed_range" not in row for row in results["rows"]):
        yield time_the_rest(workload, results, timing)


def measure(workload: Workload, settings: list[Setting]) -> dict[Setting, dict[str, Any]]:
    """A row per setting, without times; the exact decoders that they are compared with run as well."""
    assert workload.grid[0] == EXACT
    samplers = {setting.exact for setting in settings}
    exact = [s for s in workload.grid if s.policy == EXACT.policy and s.exact in samplers]
    outs: dict[Setting, dj.Output] = {}
    running = list(dict.fromkeys((EXACT, *exact, *settings)))
    for i, setting in enumerate(running):
        if i % PROGRAMS == 0:
            jax.clear_caches()
        parts = [workload.run(setting, prompt) for prompt in workload.chunks()]
        outs[setting] = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        print(f"{workload.name}: {i + 1} of {len(running)} settings run", flush=True)
    base = {setting.exact: outs[setting] for setting in exact}
    return {s: _row(workload, s, (outs[EXACT], base[s.exact]), outs[s]) for s in settings}


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
