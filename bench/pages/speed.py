"""Whole generations that were measured on GPUs, with the roofline's predictions for the same card."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import dllm_jax as dj
from bench.shared import runner
from dllm_jax.eval.run.files import read_json

RESULTS = Path(__file__).parents[1] / "results"
LENGTH = 256  # tokens of each generation: LLaDA-8B's shape, prompt 1024, batch 1, a token per step
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
    found = sorted((*_of_h100(), *_of_h200()), key=lambda one: (one.card != CARD, one.seconds))
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
