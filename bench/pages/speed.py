"""Whole generations that were measured on GPUs, with the roofline's predictions for the same card."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import dllm_jax as dj
from bench import roofline
from bench.shared import runner
from bench.shared.numbers import rounded
from dllm_jax.eval.run.files import read_json

RESULTS = Path(__file__).parents[1] / "results"
LENGTH = 256  # tokens of each generation: LLaDA-8B's shape, prompt 1024, batch 1, a token per step
PREDICTED = "roofline_h100.json"
CARD = "H200"  # of the column in tables of policies


class Generation(NamedTuple):
    """A generation of `LENGTH` tokens.

    Attributes:
      card: GPU.
      policy: Name of the policy, which had its default options.
      seconds: Median of the timed runs.
      predicted: Roofline's seconds, at the card's measured rates.
      full: Steps that recompute every token.
      compiling: Seconds to trace and compile.
      memory: Bytes of the program: arguments, results and temporaries.
    """

    card: str
    policy: str
    seconds: float
    predicted: float
    full: float
    compiling: float
    memory: int


def generations() -> list[Generation]:
    """All measured generations, by card and speed; kernels are those that `dj.load` chooses."""
    exact_first = lambda one: (one.card != CARD, one.policy != "Policy", one.seconds)
    found = sorted((*_of_h100(), *_of_h200()), key=exact_first)
    assert len({(one.card, one.policy) for one in found}) == len(found), "a policy was measured twice"
    return found


def _of_h200() -> Iterator[Generation]:
    for row in read_json(RESULTS / "generate_h200.json")["rows"]:
        if row.get("shape") == "llada-8b" and row.get("implementation", "load") == "load":
            times = median(row["seconds"]), row["predicted_s"], row["stats"]["refreshes"]
            yield _generation("H200", row, *times, row["compile_s"] + row["lower_s"])


def _of_h100() -> Iterator[Generation]:
    for part in read_json(RESULTS / "check_h100_speed.json")["parts"]["speed"]:
        row = part["data"]
        if "tokens_per_s" in row:
            times = row["seconds"]["median"], row["predicted_s"], _full_steps(_name(row))
            yield _generation("H100", row, *times, row["compile_s"])


def _generation(card: str, row: Any, seconds: float, predicted: float, full: float, s: float) -> Generation:
    return Generation(card, _name(row), seconds, predicted, full, s, row["program_bytes"])


def _full_steps(policy: str) -> float:
    """Full steps of a generation, which `check` does not record: the roofline's simulation of `select`."""
    layout = dj.Layout(prompt=1024, response=LENGTH, block=32, steps=LENGTH)
    spec = dj.presets.model_spec("llada-8b")
    work = dj.roofline.work(spec, getattr(dj.policies, policy)(), layout, batch=1)
    return sum(step.count for step in work.steps if step.step.full)


def _name(row: Any) -> str:
    return row["policy"].split("(")[0]


def tokens_per_s() -> dict[str, str]:
    """Tokens per second of each policy on `CARD`."""
    return {one.policy: f"{LENGTH / one.seconds:.0f}" for one in generations() if one.card == CARD}


def sentence(policy: str) -> str:
    """Says what was measured of a policy on `CARD`, compared with exact decoding."""
    where = "[measured](../background/performance.md#measured-on-gpus)"
    if policy == "MAGE":
        of = lambda name: median(next(row["seconds"] for row in _of_sdar() if _name(row) == name))
        times = f"{of('MAGE'):.1f} s, with `Policy()` {of('Policy'):.1f} s"
        return f"SDAR-8B's shape on one {CARD}, prompt 32 768, 64 tokens: {times} ({where})."
    speeds = tokens_per_s()
    if policy not in speeds:
        return "No speed was measured on a GPU."
    exact = "" if policy == "Policy" else f", exact decoding {speeds['Policy']}"
    return f"LLaDA-8B's shape on one {CARD}: {speeds[policy]} tokens/s{exact} ({where})."


def _of_sdar() -> list[Any]:
    rows = read_json(RESULTS / "generate_h200.json")["rows"]
    return [row for row in rows if row.get("shape", "").startswith("sdar-8b")]


def brief() -> str:
    """Markdown: tokens per second of each policy on `CARD`."""
    return runner.table(("policy", "tokens/s"), "lr", [(f"`{n}()`", v) for n, v in tokens_per_s().items()])


def table() -> str:
    """Markdown: times of each generation; steps and speeds follow from its seconds."""
    found = generations()
    exact = {one.card: one.seconds / LENGTH for one in found if one.policy == "Policy"}
    lines = []
    for one in found:
        partial = LENGTH - one.full
        mean = 1000 * (one.seconds - one.full * exact[one.card]) / partial if partial else None
        lines.append((
            one.card, f"`{one.policy}`", f"{LENGTH / one.seconds:.0f}", f"{1000 * exact[one.card]:.1f}",
            "-" if mean is None else f"{mean:.1f}", f"{one.seconds:.2f}",
        ))  # fmt: skip
    heads = "GPU", "policy", "tokens/s", "full step, ms", "partial step, ms", "256 tokens, s"
    return runner.table(heads, "llrrrr", lines)


def predicted() -> str:
    """Markdown: a partial step, a token and the speedup of each policy by prompt, by the roofline."""
    ratios: dict[str, str] = {}
    for one in generations():  # the first card that was measured
        ratios.setdefault(one.policy, rounded(one.seconds / one.predicted, 1))
    lines: dict[str, list[str]] = {}
    rows = read_json(RESULTS / PREDICTED)["rows"]
    prompts = dict.fromkeys(row["prompt"] for row in rows)
    for row in rows:
        name = row["policy"]
        lines.setdefault(name, [f"`{name}`", ratios.get(name, "-")]).append(roofline.short_cell(row))
    heads = "policy", "measured / predicted", *(f"prompt {prompt}" for prompt in prompts)
    return runner.table(heads, "l" + "r" * (len(heads) - 1), lines.values())


def costs() -> str:
    """Markdown: the prediction of each generation, and what its program costs."""
    lines = (
        (
            one.card, f"`{one.policy}`", f"{one.predicted:.2f}", f"{one.seconds / one.predicted:.1f}",
            f"{one.compiling:.0f}", f"{one.memory / 1e9:.1f}",
        )
        for one in generations()
    )  # fmt: skip
    heads = "GPU", "policy", "predicted, s", "ratio", "compile, s", "memory, GB"
    return runner.table(heads, "llrrrr", list(lines))
