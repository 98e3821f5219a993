"""The README's table of policies, one setting each, from what bench/policies.py measured.

    python -m bench.summary bench/results/policies_cpu.json

All on the chain task, where steps depend on each other; all other settings and tasks are in
docs/benchmarks.md.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.orderings import find
from bench.policies_grid import EXACT, Setting, mask_kv
from dllm_jax import embedded
from dllm_jax import policies as p
from dllm_jax import samplers as s

SHOWN: tuple[Setting, ...] = (
    EXACT,
    Setting(divide_steps=2),
    Setting(p.PrefixCache()),
    Setting(p.DualCache()),
    Setting(p.DKVDecode(refresh_every=4)),
    Setting(p.DKVGreedy(), s.RandomOrder()),
    Setting(p.DKVPrefill()),
    Setting(p.DKVPD()),
    Setting(p.DLLMCache(prompt_every=4, response_every=2)),
    Setting(p.SparseDLLM(keep=0.5)),
    mask_kv(budget=32),
    Setting(p.ElasticCache(window=8, gamma=0.9), whole=True),
    Setting(p.D2Cache(k=8, p=0.1)),
)


def table(measured: dict[str, Any]) -> str:
    """Markdown: exact match and agreement per model, then what it costs."""
    models = [name for name in embedded.NAMES if f"{name} chain" in measured]
    head = ["policy", "sampler", "steps"]
    head += [title for name in models for title in (f"{name}: exact match", "as exact")]
    head += ["computed", "K/V pairs"]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for setting in SHOWN:
        rows = [found(measured[f"{name} chain"], setting) for name in models]
        cells = [f"`{rows[0]['policy']}`", f"`{rows[0]['sampler']}`", str(rows[0]["steps"])]
        cells += [f"{row[name]:.1%}" for row in rows for name in ("accuracy", "agreement")]
        lines.append([*cells, f"{rows[0]['computed']:.0%}", f"{rows[0]['kept_pairs']:.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def found(workload: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The row of a setting.

    Raises:
      LookupError: it was not measured.
    """
    row = find(workload, setting)
    if row is None:
        raise LookupError(f"{setting} was not measured")
    return row


def main(results: Annotated[Path, tyro.conf.Positional]):
    """Prints the table."""
    print(table(json.loads(results.read_text())["models"]))


if __name__ == "__main__":
    tyro.cli(main)
