"""The table of policies in docs/results.md, a line each, from what bench.policies measured.

    python -m bench.policies.summary bench/results/policies_cpu.json

Every other setting and task is in docs/benchmarks.md.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import tyro

from bench.policies.grid import EXACT, Setting, at_defaults, find, mask_kv
from bench.shared import runner
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.eval.run.files import read_json
from dllm_jax.published.expressions import call

TASKS = ("chain", "needle-256", "few-shot")
HEADS = ("policy", "chain", "needle, 256 tokens", "few-shot", "as exact", "computed", "K/V pairs")


@dataclasses.dataclass(frozen=True)
class Line:
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


LINES = (
    Line(EXACT),
    Line(Setting(divide_steps=2), note="half the steps"),
    Line(Setting(p.PrefixCache())),
    Line(Setting(p.DualCache())),
    Line(Setting(p.DKVDecode(refresh_every=4))),
    Line(Setting(p.DKVGreedy(), s.RandomOrder()), note="random order"),
    Line(Setting(p.DKVPrefill())),
    Line(Setting(p.DKVPD())),
    Line(
        Setting(p.DLLMCache(prompt_every=4, response_every=2)),
        Setting(p.DLLMCache(prompt_every=32, response_every=2)),
    ),
    Line(Setting(p.SparseDLLM(keep=0.5)), Setting(p.SparseDLLM(keep=0.5, delay=0))),
    Line(mask_kv(budget=32)),
    Line(Setting(p.EvictPrompt(budget=16))),
    Line(
        Setting(p.ElasticCache(window=8, gamma=0.9), blocks=1),
        Setting(p.ElasticCache(window=2, gamma=0.9)),
        note="one block",
    ),
    Line(Setting(p.D2Cache(k=8, p=0.1)), Setting(p.D2Cache(k=2, p=0.1))),
)


def lines(measured: dict[str, Any], policies: Iterable[p.Policy] = p.ALL) -> list[Line]:
    """The lines of the policies that were measured, those without a line of their own at their defaults.

    Results do not hold policies that are newer than they are.
    """
    names = {row["policy"].split("(")[0] for workload in measured.values() for row in workload["rows"]}
    rest = map(Line, at_defaults([line.chain for line in LINES], policies))
    return [line for line in (*LINES, *rest) if type(line.chain.policy).__name__ in names]


def table(measured: dict[str, Any], model: str) -> str:
    """Markdown: exact match on each task, then agreement and costs on chains, and which settings differ.

    Raises:
      LookupError: a setting of a policy that was measured was not measured.
    """
    cells, shown = [], lines(measured)
    for line in shown:
        rows = [found(measured[f"{model} {task}"], line.on(task)) for task in TASKS]
        chain = rows[0]
        name = f"`{chain['policy']}`" + (f", {line.note}" if line.note else "")
        rates = [f"{row['accuracy']:.1%}" for row in rows] + [f"{chain['agreement']:.1%}"]
        cells.append((name, *rates, f"{chain['computed']:.0%}", f"{chain['kept_pairs']:.0f}"))
    others = ", ".join(f"`{call(line.short.policy)}`" for line in shown if line.short)
    note = f"Needles and few-shot prompts have answers of four tokens, one block; there it is {others}."
    return f"{runner.table(HEADS, 'lrrrrrr', cells)}\n\n{note}"


def found(workload: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The row of a setting.

    Raises:
      LookupError: it was not measured.
    """
    row = find(workload, setting)
    if row is None:
        raise LookupError(f"{setting} was not measured")
    return row


def main(results: runner.Results, model: str = "tiny-llada"):
    """Prints the table."""
    print(table(read_json(results)["models"], model))


if __name__ == "__main__":
    tyro.cli(main)
