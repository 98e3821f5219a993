"""The tables of policies in background/results.md, policies/index.md and how-to/vision.md, as measured.

    cd bench/results
    python -m bench.policies.summary policies_cpu.json --blocks policies_blocks_cpu.json

Of the models that read text a line per policy, and right answers against tokens per forward where steps are
fewer; `bench.policies.every` prints every other setting and task. Of pictures, all settings.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tyro

import dllm_jax as dj
from bench.policies import grid
from bench.policies.grid import EXACT, HALF_THE_STEPS, THRESHOLD, Setting, find, mask_kv
from bench.policies.workloads import ASKED_IN_BLOCKS, ASKED_IN_CANVASES, ASKED_OF_PICTURES
from bench.shared import runner
from bench.shared.numbers import percent, rounded
from dllm_jax import policies as p
from dllm_jax import samplers as s
from dllm_jax.command_line import run
from dllm_jax.eval.run.files import read_json
from dllm_jax.eviction import MaskVotes
from dllm_jax.expressions import call

CHAINS, SHORT = ("chain", "chain-among-values"), ("needle-256", "few-shot")
TASKS = CHAINS + SHORT
COSTS = "computed", "KV pairs"
HARDER = ("chain-among-values", "chain-of-16", "chain-in-128")
NONE: dict[str, Any] = {"rows": [], "block": 0, "length": 0}  # of a task that was not measured
PROMPTS = 128  # of a task, unless a cell says otherwise
BLOCKS = (8, 4, 1)  # of the 32 positions of an answer
FEWER = {"a token per step": EXACT, "half the steps": HALF_THE_STEPS, "threshold 0.9": THRESHOLD}


@dataclasses.dataclass(frozen=True)
class Line:
    """A line: a setting on chains, whose answers have 32 tokens, and a note that its policy does not say.

    `short` is its counterpart on the other tasks, whose answers have four; the same if None.
    """

    chain: Setting
    short: Setting | None = None
    note: str = ""

    def on(self, task: str) -> Setting:
        """The setting on a task."""
        return self.chain if task.startswith("chain") or self.short is None else self.short


_one_block = lambda policy: Setting(policy, blocks=1)
_decode = p.DKVDecode(refresh_every=4)
LINES = (
    Line(EXACT),
    Line(Setting(blocks=1), note="one block"),
    Line(HALF_THE_STEPS, note="half the steps"),
    Line(THRESHOLD, EXACT, note="threshold 0.9"),
    Line(Setting(p.PrefixCache())),
    Line(Setting(p.DualCache())),
    Line(_one_block(p.DualCache()), note="one block"),
    Line(Setting(_decode)),
    Line(_one_block(_decode), note="one block"),
    Line(_one_block(p.DKVDecode(refresh_every=8)), Setting(_decode), note="one block"),
    Line(Setting(p.DKVPrefill())),
    Line(Setting(p.DKVPD())),
    Line(Setting(sampler=s.RandomOrder()), note="random order"),
    Line(Setting(p.DKVGreedy(), s.RandomOrder()), note="random order"),
    Line(Setting(p.DLLMCache(prompt_every=32, response_every=2))),
    Line(Setting(p.DLLMCache(prompt_every=32, response_every=4))),
    *(Line(Setting(p.SparseDLLM(keep=k)), Setting(p.SparseDLLM(keep=k, delay=0))) for k in (0.75, 0.5, 0.25)),
    *(Line(mask_kv(budget=budget)) for budget in (64, 32, 8)),
    *(Line(mask_kv(budget=budget, reselect=True), mask_kv(budget=budget)) for budget in (32, 16)),
    *(Line(Setting(p.EvictPrompt(budget=budget))) for budget in (64, 32, 16, 8)),
    Line(Setting(p.EvictPrompt(budget=8, votes=MaskVotes()))),
    *(
        Line(
            _one_block(p.ElasticCache(window=8, gamma=gamma)), Setting(p.ElasticCache(window=2, gamma=gamma)),
            note="one block",
        )
        for gamma in (0.5, 0.9)
    ),
    Line(Setting(p.D2Cache(k=8)), Setting(p.D2Cache(k=2))),
    Line(_one_block(p.D2Cache(k=8)), Setting(p.D2Cache(k=2)), note="one block"),
    *(Line(setting, Setting(type(setting.policy)()), note=setting.variant) for setting in grid.LATER),
)  # fmt: skip


def lines(measured: dict[str, Any], policies: Iterable[p.Policy] = p.ALL) -> list[Line]:
    """The lines of the policies that were measured, those without a line of their own at their defaults.

    Results do not hold policies that are newer than they are, or not on every task.
    """
    asked = [workload for name, workload in measured.items() if name.split()[1] in TASKS]
    names = set.intersection(*({row["policy"].split("(")[0] for row in of["rows"]} for of in asked))
    rest = map(Line, grid.at_defaults([line.chain for line in LINES], policies))
    return [line for line in (*LINES, *rest) if type(line.chain.policy).__name__ in names]


def table(measured: dict[str, Any], models: Sequence[str]) -> str:
    """Markdown: costs on the first model's chains, and exact match by task.

    A cell of a task has a rate for each model; the last column has the lowest rate on questions whose answers
    have four tokens.

    Raises:
      LookupError: a setting of a policy that was measured was not measured.
    """
    shown, cells = lines(measured), []
    for line in shown:
        by_task = {task: _by_model(measured, models, line.on(task), task) for task in TASKS}
        chains = [", ".join(_rate(row) for row in by_task[task]) for task in CHAINS]
        lowest = min((row for task in SHORT for row in by_task[task]), key=lambda row: row["accuracy"])
        costs = by_task["chain"][0]
        cells.append([*_named(costs["policy"], line.note, costs), *chains, _rate(lowest)])
    return _table([*(task.replace("-", " ") for task in CHAINS), "lowest of needle, few-shot"], cells)


def _by_model(measured: dict[str, Any], models: Sequence[str], setting: Setting, task: str) -> list[Any]:
    asked = (f"{model} {task}" for model in models)
    return [found(measured[name], setting) for name in asked if name in measured]


def _rate(row: dict[str, Any] | None) -> str:
    return percent(row["accuracy"]) if row else "-"  # not measured


def of_policy(measured: dict[str, Any], kind: type[p.Policy]) -> str:
    """Markdown: the rows of `table` for one policy, exact decoding and `DualCache`, on chains."""
    asked = [measured[f"{model} chain"] for model in dj.bundled.TEXT]
    compared, cells = (EXACT, Setting(p.DualCache())), []
    for line in LINES:
        if line.chain in compared or (type(line.chain.policy) is kind and kind is not p.Policy):
            rows = [find(workload, line.chain) for workload in asked]
            if costs := next(filter(None, rows), None):
                cells.append([*_named(costs["policy"], line.note, costs), *map(_rate, rows)])
    return _table([f"`{model}`" for model in dj.bundled.TEXT], cells)


def pictured(measured: dict[str, Any], model: str) -> str:
    """Markdown: exact match on questions about pictures with its 95 % interval, costs on the last task."""

    def rate(row: dict[str, Any]) -> str:
        low, high = row["interval"]
        return f"{percent(row['accuracy'], 1)} ({rounded(100 * low)}-{rounded(100 * high)})"

    cells = []
    for setting in grid.PICTURED:
        measures = (find(measured[f"{model} {task}"], setting) for task in ASKED_OF_PICTURES)
        rows = [row for row in measures if row is not None]
        if len(rows) == len(ASKED_OF_PICTURES):
            cells.append([*_named(call(setting.policy), setting.variant, rows[-1]), *map(rate, rows)])
    return _table([*ASKED_OF_PICTURES], cells)


def _named(policy: str, note: str, costs: dict[str, Any]) -> list[str]:
    name = f"`{policy}`" + (f", {note}" if note else "")
    return [name, percent(costs["computed"]), rounded(costs["kept_pairs"])]


def _table(tasks: list[str], cells: list[list[str]]) -> str:
    return runner.table(("policy", *COSTS, *tasks), "l" + "r" * (len(tasks) + 2), cells)


def fewer_steps(measured: dict[str, Any], models: Iterable[str]) -> str:
    """Markdown: on chains, right answers and tokens per forward of each policy as steps become fewer."""
    workloads = [measured[f"{model} chain"] for model in models]
    cells = []
    for policy in (EXACT.policy, *grid.CACHES):
        settings = [dataclasses.replace(fewer, policy=policy) for fewer in FEWER.values()]
        rows = [found(workload, setting) for workload in workloads for setting in settings]
        faster = (rounded(workloads[0]["length"] / row["forwards"], 1) for row in rows)
        shown = (f"{percent(row['accuracy'], 1)} ({n})" for row, n in zip(rows, faster, strict=True))
        cells.append((f"`{call(policy)}`", *shown))
    heads = ("policy", *(f"`{model}`, {way}" for model in models for way in FEWER))
    return runner.table(heads, "l" + "r" * (len(heads) - 1), cells)


def later(measured: dict[str, Any], models: Sequence[str]) -> str:
    """Markdown: on chains, what came after the five papers; right answers alone of harder ones."""
    caches = (EXACT, Setting(p.DualCache()), Setting(p.DKVPD()), Setting(p.D2Cache(k=8)))
    parallel = (dataclasses.replace(setting, sampler=THRESHOLD.sampler) for setting in caches)
    cells, tasks = [], ("chain", *HARDER)
    for setting in (*caches, *parallel, *grid.LATER_SETTINGS):
        rows = {task: [find(measured.get(f"{m} {task}", NONE), setting) for m in models] for task in tasks}
        if costs := next(filter(None, rows["chain"]), None):
            name = f"`{call(setting.policy)}`, `{call(setting.sampler)}`"
            name += f", {setting.variant}" if setting.variant else ""
            rates = (", ".join(map(_rate, of)) for of in rows.values())
            cells.append([name, rounded(costs["forwards"], 1), percent(costs["computed"]), *rates])
    heads = ("policy, sampler", "forward passes", "computed", *(task.replace("-", " ") for task in tasks))
    return runner.table(heads, "l" + "r" * (len(heads) - 1), cells)


def in_blocks(measured: dict[str, Any], models: Sequence[str]) -> str:
    """Markdown: right answers to chains as blocks become longer; "-" is a setting that was not measured."""
    cells = []
    policies = (p.Policy(), p.DualCache(), *grid.STORING, *grid.EVICTING)
    for policy in policies:
        shown = []
        for model, count in itertools.product(models, BLOCKS):
            setting = Setting(policy, blocks=count)
            shown.append("-")
            for task in ("chain-in-blocks", "chain"):
                workload = measured[f"{model} {task}"]
                if row := find(workload, setting):
                    count = workload["prompt"][0]
                    shown[-1] = _rate(row) + ("" if count == PROMPTS else f" ({count})")
        cells.append((f"`{call(policy)}`", *shown))
    heads = ("policy", *(f"`{model}`, blocks of {32 // count}" for model in models for count in BLOCKS))
    return runner.table(heads, "l" + "r" * (len(heads) - 1), cells)


def block_causal(measured: dict[str, Any], models: Sequence[str], kind: type[p.Policy] | None = None) -> str:
    """Markdown: right answers of models that attend within blocks, and the pairs that a step reads.

    With `kind` the rows of one policy, and exact decoding.
    """
    names = {task: [f"{model} {task}" for model in models] for task in ASKED_IN_BLOCKS}
    asked = {task: [measured[name] for name in of if name in measured] for task, of in names.items()}
    asked, cells = {task: of for task, of in asked.items() if of}, []
    for setting in grid.BLOCK_CAUSAL:
        if kind is None or setting == EXACT or type(setting.policy) is kind:
            rows = [[found(of_model, setting) for of_model in of_task] for of_task in asked.values()]
            shown = (
                ", ".join(map(_rate, of_task)) + f" ({rounded(of_task[0]['pairs_read'])})" for of_task in rows
            )
            cells.append((f"`{call(setting.policy)}`", *shown, percent(rows[0][0]["computed"])))
    heads = ("policy", *asked, "computed")
    return runner.table(heads, "l" + "r" * (len(heads) - 1), cells)


def in_canvases(measured: dict[str, Any], model: str) -> str:
    """Markdown: forward passes, computed tokens and right answers of a model without a mask token."""
    asked, cells = [measured[f"{model} {task}"] for task in ASKED_IN_CANVASES], []
    for setting in grid.IN_CANVASES:
        rows = [found(workload, setting) for workload in asked]
        shown = (
            (rounded(row["forwards"], 1), percent(row["computed"]), percent(row["accuracy"], 1))
            for row in rows
        )
        named = f"`{call(setting.policy)}`", f"`{call(setting.sampler)}`"
        cells.append((*named, *itertools.chain(*shown)))
    heads = (f"{task}: {what}" for task in ASKED_IN_CANVASES for what in ("passes", "computed", "right"))
    count, prompt = asked[0]["prompt"]
    caption = (
        f"*Right answers of `{model}` to {count} held-out questions of each kind, {prompt} tokens each, one "
        f"canvas of {asked[0]['length']}, float32. passes: forward passes, the prompt's causal one included. "
        "computed: computed tokens relative to `Policy()`. What `DLLMCache`, `SPACache` and `DyLLM` skip "
        "inside of layers does not count.*"
    )
    return runner.table(("policy", "sampler", *heads), "ll" + "rrr" * len(asked), cells) + f"\n\n{caption}"


def found(workload: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The row of a setting, which must have been measured."""
    if row := find(workload, setting):
        return row
    raise LookupError(f"{setting} was not measured")


def main(results: runner.Results, blocks: Path | None = None):
    """Prints the tables of what the file has, and of longer blocks what the file `blocks` has."""
    measured = read_json(results)["models"]
    if blocks is not None:
        print(in_blocks(measured | read_json(blocks)["models"], dj.bundled.TEXT), end="\n\n")
    if any(name.split()[0] in dj.bundled.TEXT for name in measured):
        print(table(measured, dj.bundled.TEXT), fewer_steps(measured, dj.bundled.TEXT), sep="\n\n")
        print(f"\n{later(measured, dj.bundled.TEXT)}")
    for model in dj.bundled.PICTURED:
        if all(f"{model} {task}" in measured for task in ASKED_OF_PICTURES):
            print(pictured(measured, model))
    if any(name.split()[0] in dj.bundled.BLOCK_CAUSAL for name in measured):
        print(block_causal(measured, dj.bundled.BLOCK_CAUSAL))
    for model in dj.bundled.NOISE:
        if any(name.split()[0] == model for name in measured):
            print(in_canvases(measured, model))


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
