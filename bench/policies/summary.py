"""The README's table of policies, a line each, from what bench.policies measured.

    python -m bench.policies.summary bench/results/policies_cpu.json

Every other setting and task is in docs/benchmarks.md.
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.policies.grid import EXACT, Setting, mask_kv
from bench.policies.rows import find
from bench.shared import markdown
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.published.expressions import call

TASKS = ("chain", "needle-256", "few-shot")
HEADS = ("policy", "chain", "needle, 256 tokens", "few-shot", "as exact", "computed", "K/V pairs")


@dataclasses.dataclass(frozen=True)
class Shown:
    """A line of the table.

    Attributes:
      chain: the setting on chains, whose answers have 32 tokens.
      short: its counterpart on the other tasks, whose answers have four; the same if None.
      note: what its policy does not say.
    """

    chain: Setting
    short: Setting | None = None
    note: str = ""

    def on(self, task: str) -> Setting:
        """The setting on a task."""
        return self.chain if task == "chain" or self.short is None else self.short


SHOWN = (
    Shown(EXACT),
    Shown(Setting(divide_steps=2), note="half the steps"),
    Shown(Setting(p.PrefixCache())),
    Shown(Setting(p.DualCache())),
    Shown(Setting(p.DKVDecode(refresh_every=4))),
    Shown(Setting(p.DKVGreedy(), s.RandomOrder()), note="random order"),
    Shown(Setting(p.DKVPrefill())),
    Shown(Setting(p.DKVPD())),
    Shown(
        Setting(p.DLLMCache(prompt_every=4, response_every=2)),
        Setting(p.DLLMCache(prompt_every=32, response_every=2)),
    ),
    Shown(Setting(p.SparseDLLM(keep=0.5)), Setting(p.SparseDLLM(keep=0.5, delay=0))),
    Shown(mask_kv(budget=32)),
    Shown(
        Setting(p.ElasticCache(window=8, gamma=0.9), whole=True),
        Setting(p.ElasticCache(window=2, gamma=0.9)),
        note="one block",
    ),
    Shown(Setting(p.D2Cache(k=8, p=0.1)), Setting(p.D2Cache(k=2, p=0.1))),
)


def table(measured: dict[str, Any], model: str) -> str:
    """Markdown: exact match on each task, then agreement and costs on chains, and which settings differ.

    Raises:
      LookupError: a setting was not measured.
    """
    lines = []
    for shown in SHOWN:
        rows = [found(measured[f"{model} {task}"], shown.on(task)) for task in TASKS]
        chain = rows[0]
        name = f"`{chain['policy']}`" + (f", {shown.note}" if shown.note else "")
        shares = [f"{row['accuracy']:.1%}" for row in rows] + [f"{chain['agreement']:.1%}"]
        lines.append((name, *shares, f"{chain['computed']:.0%}", f"{chain['kept_pairs']:.0f}"))
    others = ", ".join(f"`{call(shown.short.policy)}`" for shown in SHOWN if shown.short)
    note = f"Needles and few-shot prompts have answers of four tokens, one block; there it is {others}."
    return f"{markdown.table(HEADS, 'lrrrrrr', lines)}\n\n{note}"


def found(workload: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The row of a setting.

    Raises:
      LookupError: it was not measured.
    """
    row = find(workload, setting)
    if row is None:
        raise LookupError(f"{setting} was not measured")
    return row


def main(results: Annotated[Path, tyro.conf.Positional], model: str = "tiny-llada"):
    """Prints the table."""
    print(table(json.loads(results.read_text())["models"], model))


if __name__ == "__main__":
    tyro.cli(main)
