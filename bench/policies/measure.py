"""Measures settings of a workload: how right and how like the exact decoder's answers are, and their cost."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from bench.policies.grid import Setting, find
from bench.policies.workloads import Workload
from dllm_jax import roofline
from dllm_jax.policies.base import for_model

SAVED = 16  # settings until results are written
PROGRAMS = 8  # settings until compiled programs are dropped: they use up the process's memory maps


def stages(workload: Workload, earlier: dict[str, Any], saved: int = SAVED) -> Iterator[dict[str, Any]]:
    """A workload's results, after every `saved` settings have run.

    Rows that `earlier` results have of the same workload are not run again; rows of settings that the grid
    does not have any more are left out.
    """
    about = workload.described
    of_run = ("date", "commit", "cpu")  # files of several runs say these of each workload
    same = all(earlier.get(key, "") == value for key, value in about.items() if key not in of_run)
    results: dict[str, Any] = earlier if same else about | {"rows": []}

    # By the curve too: where a response is one block long, "one block" is named like the rest.
    rows = {setting: find(results, setting, curve=setting.curve) for setting in workload.grid}
    missing = [setting for setting, row in rows.items() if row is None]
    decoded: dict[Setting, dj.Output] = {}
    for start in range(0, len(missing), saved):
        rows |= measure(workload, missing[start : start + saved], decoded)
        done = min(start + saved, len(missing))
        print(f"{workload.name}: {done} of {len(missing)} settings run", file=sys.stderr)
        yield results | about | {"rows": [row for row in rows.values() if row is not None]}


def measure(
    workload: Workload, settings: list[Setting], decoded: dict[Setting, dj.Output]
) -> dict[Setting, dict[str, Any]]:
    """A row per setting; the exact decoders that they are compared with run once and stay in `decoded`."""
    exact = workload.grid[0]
    assert exact == exact.exact
    running = dict.fromkeys([exact, *(run for s in settings for run in (s.exact, s.unlabeled))])
    for i, setting in enumerate(setting for setting in running if setting not in decoded):
        if i % PROGRAMS == 0:
            jax.clear_caches()
        parts = [workload.run(setting, prompts) for prompts in workload.chunks()]
        decoded[setting] = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return {s: _row(workload, s, decoded[exact], decoded[s.exact], decoded[s.unlabeled]) for s in settings}


def _row(workload: Workload, setting: Setting, plain: dj.Output, base: dj.Output, out: dj.Output) -> dict:
    """`plain` is the exact decoder, `base` the one with the setting's own sampler and schedule."""
    responses = lambda out: out.tokens[:, workload.prompt.shape[1] :]
    recomputed = np.sum(out.stats.computed_tokens) + np.sum(out.stats.widened_tokens)
    pairs, size = _storage(workload, setting)
    return setting.named(workload.length, workload.block) | {
        "curve": setting.curve, **workload.scores(responses(out)),
        "agreement": float(np.mean(responses(base) == responses(out))),
        "forwards": float(np.mean(out.stats.nfe)),
        "computed": float(recomputed / np.sum(plain.stats.computed_tokens)),
        "kept_pairs": pairs, "cache_bytes": size, "dllm_jax": dj.__version__, **_reads(workload, setting),
    }  # fmt: skip


def _reads(workload: Workload, setting: Setting) -> dict[str, float]:
    """K/V pairs per layer and KV head that a step after the first attends to, of a block-causal model.

    By the roofline, which counts the pairs that programs read: with the slots that a mask hides. Of a model
    with larger layers: programs of small ones have one width, in which each step reads as an entering one.
    """
    spec, steps = workload.model.spec, workload.length // setting.divide_steps
    if not spec.block_size or not spec.has_mask_token:
        return {}
    experts = spec.experts and dataclasses.replace(spec.experts, mlp_width=2**20)
    spec = dataclasses.replace(spec, mlp_width=2**20, experts=experts)
    prompt = workload.prompt.shape[1]
    layout = dj.Layout.of(prompt, workload.length, workload.block, steps, tail=spec.block_size - 1)
    counted = roofline.schedule(setting.policy, spec, layout)
    later = {step: count for step, count in counted.items() if not step.full}
    return {"pairs_read": sum(step.slots * count for step, count in later.items()) / sum(later.values())}


def _storage(workload: Workload, setting: Setting) -> tuple[float, int]:
    """K/V pairs per layer and KV head, and bytes of the whole cache, both per prompt."""
    spec, block = workload.model.spec, setting.block(workload.length, workload.block)
    steps = workload.length // setting.divide_steps
    layout = dj.Layout.of(workload.prompt.shape[1], workload.length, block, steps)
    made = jax.eval_shape(lambda: for_model(setting.policy, spec).init(spec, layout, 1, jnp.float32))
    leaves = jax.tree_util.tree_leaves_with_path(made)
    keys = sum(leaf.size for path, leaf in leaves if getattr(path[-1], "name", "") == "k")
    size = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    of_layers = sum(spec.at(layer).kv_heads * spec.at(layer).head_dim for layer in range(spec.layers))
    return keys / of_layers, size
