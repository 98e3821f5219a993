"""The model card of an embedded model: everything on it was measured on the files that are shipped."""

import os
import platform
from typing import Any

import jax

from dllm_jax.model import Model
from dllm_jax.parameters import count
from dllm_jax.tasks import Recall, accuracy, examples
from dllm_jax.training import TrainConfig

GRID = ((2, 0), (4, 0), (6, 0), (8, 0), (4, 60), (6, 36), (8, 42), (8, 84))  # pairs, filler
BEYOND = ((12, 0), (16, 0), (8, 148), (8, 212))  # more pairs, longer prompts than it was trained on
PER_SIZE = 32
ROWS = 12
CARD = """\
---
license: apache-2.0
library_name: dllm_jax
tags: [diffusion-language-model, llada, synthetic]
---
# {name}

A {parameters:,}-parameter model of LLaDA's architecture ({layers} layers, {heads} heads, width {width}),
trained from nothing with LLaDA's masked-diffusion loss to answer one kind of question:
`aob=w;eit=m;ut=` -> `m`. It exists to test and to show decoding where no real checkpoint is at hand
and knows no language.

```python
import dllm_jax as dj
from dllm_jax import embedded
from transformers import AutoTokenizer

where = embedded.path("{name}")
model, tokenizer = dj.load(where), AutoTokenizer.from_pretrained(where)
question = [{{"role": "user", "content": "b=w;t=m;t="}}]
dj.chat(model, tokenizer, question, length=4)
```

Keys and values are one consonant each, vowels between the pairs mean nothing. Trained on up to 8 pairs
and prompts of up to 128 tokens; the curve says which of the {stages} stages the run had reached.
Use `length=4`: the letter, end of turn, end of text.

## Training

`python bench/train_tiny.py {name}` reproduces it: {steps} steps, seed {seed}, AdamW at {rate} (warm-up
{warmup}, linear decay over the last {decay} steps), {tokens:.1f} M tokens,
{hours:.2f} h ({speed:,.0f} tokens/s) on {device}, jax {jax}. The curriculum opens a stage when
85 % of fresh examples of the one before are answered right; every number is in training_log.json.

| step | stage | loss per token (nats) | accuracy on masked tokens | minutes |
|---:|---:|---:|---:|---:|
{curve}

## Accuracy

Exact match on held-out prompts, none of which is ever trained on, decoded by `dj.generate` with
`Policy()`, `Confidence()`, length = block = steps = 4, float32: **{overall:.1%} of {total}**.

| pairs | filler | prompt tokens | prompts | exact match | guessing |
|---:|---:|---:|---:|---:|---:|
{table}

Beyond what it was trained on (not counted above):

| pairs | filler | prompt tokens | prompts | exact match | guessing |
|---:|---:|---:|---:|---:|---:|
{beyond}
"""


def measure(model: Model, tokenizer: Any, grid: tuple[tuple[int, int], ...] = GRID) -> list[dict[str, Any]]:
    """Accuracy on held-out prompts; one row per (pairs, filler)."""
    rows = []
    for size, filler in grid:
        drawn = examples(Recall(filler=filler), 2026, size, PER_SIZE, "held_out")
        score = accuracy(model, tokenizer, drawn, PER_SIZE, length=4)
        prompt = len(drawn[0].prompt) + 10
        rows.append({"pairs": size, "filler": filler, "prompt": prompt, "count": PER_SIZE, "exact": score})
    return rows


def overall(rows: list[dict[str, Any]]) -> float:
    """Accuracy over all sizes."""
    scores = [row["exact"] for row in rows]
    return sum(scores) / len(scores)


def card(
    name: str, model: Model, config: TrainConfig, stages: int, log: list, rows: list, beyond: list
) -> str:
    """README.md of the model."""
    spec, last = model.spec, log[-1]
    shown = [log[round(i * (len(log) - 1) / (ROWS - 1))] for i in range(ROWS)]
    return CARD.format(
        name=name, parameters=count(model.params), layers=spec.layers, heads=spec.heads, width=spec.width,
        steps=config.steps, seed=config.seed, rate=config.learning_rate, warmup=config.warmup,
        decay=config.decay, tokens=last["tokens"] / 1e6, hours=last["seconds"] / 3600,
        speed=last["tokens"] / last["seconds"], device=device(), jax=jax.__version__,
        curve="\n".join(_curve_row(entry) for entry in shown), overall=overall(rows),
        total=PER_SIZE * len(rows), stages=stages,
        beyond="\n".join(map(_accuracy_row, beyond)), table="\n".join(map(_accuracy_row, rows)),
    )  # fmt: skip


def device() -> str:
    """Where it was trained, in words."""
    kind = jax.devices()[0].device_kind
    return f"{os.cpu_count()} shared {platform.machine()} CPU cores" if kind == "cpu" else kind


def _curve_row(entry: dict[str, Any]) -> str:
    cells = entry["step"], entry["source"]["stage"] + 1, f"{entry['loss']:.3f}"
    return "| {} | {} | {} | {:.3f} | {:.0f} |".format(*cells, entry["accuracy"], entry["seconds"] / 60)


def _accuracy_row(row: dict[str, Any]) -> str:
    return "| {pairs} | {filler} | {prompt} | {count} | {exact:.1%} | {guess:.1%} |".format(
        **row, guess=1 / row["pairs"]
    )
