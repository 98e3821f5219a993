"""The model card of a bundled model: everything on it was measured on the files that are shipped."""

import os
import platform
from pathlib import Path
from typing import Any

import jax

from bench.train_tiny.held_out import BEYOND, CAREFUL, LONGER, HeldOutPrompts
from bench.train_tiny.recipes import Recipe
from dllm_jax import load, tasks
from dllm_jax.nn.model import Model
from dllm_jax.options import call
from dllm_jax.tasks.text import TEMPLATE_TOKENS
from dllm_jax.training import Run

CURVE_ROWS = 12
TRAINING = """\
## Training

`python -m bench.train_tiny {name}`: {steps} steps, seed {seed}, Muon {muon} for the layers' matrices and
AdamW {rate} for the rest (warm-up {warmup}, linear decay over the last {decay} steps), {tokens:.1f} M tokens,
{hours:.2f} h ({speed:,.0f} tokens/s) on {device}, jax {jax}. The curriculum opens a stage when fresh
examples of the one before are answered right; every number is in training_log.json. {history}

| step | stage of {stages} | loss per token (nats) | accuracy on masked tokens | minutes |
|---:|---:|---:|---:|---:|
{curve}

"""
ACCURACY = """\
## Accuracy

Exact match on held-out prompts, none of which is ever trained on, decoded by `dj.generate` with
`Policy()`, {decoded}, float32:

| task | asked | prompt tokens | length | block | prompts | exact match | guessing |
|---|---|---:|---:|---:|---:|---:|---:|
{table}
"""
BEYOND_TRAINING = """
Beyond what it was trained on, {blocks}:

| task | asked | prompt tokens | rope factor | prompts | exact match | guessing |
|---|---|---:|---:|---:|---:|---:|
{beyond}
"""


def measure(model: Model, tokenizer: Any, kinds: tuple[HeldOutPrompts, ...]) -> list[dict[str, Any]]:
    """Accuracy on held-out prompts; one row per kind."""
    rows = []
    for kind in kinds:
        drawn = tasks.examples(kind.task, 2026, kind.size, kind.prompts, "held_out")
        key = jax.random.key(0) if kind.sampler.draws else None
        score = tasks.accuracy(
            model, tokenizer, drawn, kind.batch, length=kind.length, block=kind.block, sampler=kind.sampler,
            key=key,
        )  # fmt: skip
        row = {
            "task": kind.title or kind.task.name, "size": kind.size, "asked": kind.words,
            "prompt": positions(model, tokenizer, drawn[0]), "length": kind.length,
            "block": kind.block or kind.length, "count": kind.prompts, "exact": score, "guess": kind.guess,
        }  # fmt: skip
        rows.append(row)
    return rows


def positions(model: Model, tokenizer: Any, example: tasks.Example) -> int:
    """Positions of an example's prompt."""
    if model.spec.vision is None:
        return len(example.prompt) + TEMPLATE_TOKENS
    return len(tokenizer.prompt(example.messages, model.spec.vision).ids)


def beyond_training(where: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """Longer prompts, with and without a larger rotary base, and larger sizes of the other tasks."""
    rows = [row | {"rope_factor": 1} for row in measure(load(where), tokenizer, BEYOND)]
    for factor in (2, 4):
        model = load(where, rope_factor=factor)
        rows += [row | {"rope_factor": factor} for row in measure(model, tokenizer, LONGER)]
    return rows


def text(recipe: Recipe, run: Run, measured: dict[str, Any]) -> str:
    """README.md of a model: what that of the shipped one says of it, how it was trained, what it answers."""
    config, log, last, stages = recipe.config, run.log, run.log[-1], len(recipe.stages)
    places = dict.fromkeys(round(i * (len(log) - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS))
    about = (recipe.shipped / "README.md").read_text().split("## Training\n")[0]
    return about + (TRAINING + ACCURACY + BEYOND_TRAINING * ("beyond" in measured)).format(
        name=recipe.name, steps=config.steps, seed=config.seed, rate=config.learning_rate, muon=config.muon,
        warmup=config.warmup, decay=config.decay, tokens=last["tokens"] / 1e6, hours=last["seconds"] / 3600,
        speed=last["tokens"] / last["seconds"], device=device(), history=recipe.history, jax=jax.__version__,
        stages=stages, curve="\n".join(_curve_row(log[place], stages) for place in places),
        table="\n".join(map(accuracy_row, measured["held_out"])),
        beyond="\n".join(map(accuracy_row, measured.get("beyond", ()))),
        blocks="in the model's blocks" if run.model.spec.block_size else "in one block",
        decoded="`Confidence()`, as many steps as response positions"
        if run.model.spec.has_mask_token
        else f"`{call(CAREFUL)}`",
    )  # fmt: skip


def device() -> str:
    """Where it was trained, in words."""
    kind = jax.devices()[0].device_kind
    return f"one of {os.cpu_count()} shared {platform.machine()} CPU cores" if kind == "cpu" else kind


def _curve_row(entry: dict[str, Any], stages: int) -> str:
    stage = "all" if entry["source"]["stage"] == stages else entry["source"]["stage"] + 1
    numbers = entry["loss"], entry["accuracy"], entry["seconds"] / 60
    return f"| {entry['step']} | {stage} " + "| {:.3f} | {:.3f} | {:.0f} |".format(*numbers)


def accuracy_row(row: dict[str, Any]) -> str:
    """A line of a table of `measure`'s rows."""
    how = (row["rope_factor"],) if "rope_factor" in row else (row["length"], row["block"])
    factor = "".join(f" {number} |" for number in how)
    start = f"| {row['task']} | {row['asked']} | {row['prompt']} |{factor} {row['count']} "
    return start + "| {:.1%} | {:.1%} |".format(row["exact"], row["guess"])
