"""The model card of an embedded model: everything on it was measured on the files that are shipped."""

import dataclasses
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from dllm_jax import load
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import count
from dllm_jax.tasks import (
    Chain,
    Example,
    FewShot,
    ReadNumbers,
    Recall,
    Sorting,
    Task,
    accuracy,
    examples,
    needle,
)
from dllm_jax.tasks.recall import TEMPLATE_TOKENS
from dllm_jax.training import Run

if TYPE_CHECKING:
    from bench.train_tiny.recipes import Recipe

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
`Policy()`, `Confidence()`, as many steps as response positions, float32:

| task | asked | prompt tokens | length | block | prompts | exact match | guessing |
|---|---|---:|---:|---:|---:|---:|---:|
{table}
"""
TEXT = """\
---
license: apache-2.0
library_name: dllm_jax
tags: [diffusion-language-model, {family}, synthetic]
---
# {name}

A {parameters:,}-parameter model of {Family}'s architecture ({layers} layers, {heads} heads{grouped},
width {width}), trained from nothing with LLaDA's masked-diffusion loss to answer four kinds of questions. It
exists to test and to show decoding where no real checkpoint is at hand, and to tell cache policies apart. It
knows no language.

| task | question | answer | asks of a cache |
|---|---|---|---|
| needle | `aob=407;eT=211;ub=` | `407` | one place in up to 1024 tokens |
| needles | `aob=407;eT=211;b=???;T=???;` | `b=407;T=211;`, eight of them | several places, 48 tokens |
| chain | `c>T;b>c;T>b;b>` | `b>c;c>T;T>b;`, seven steps | 28 tokens, each step from the one before |
| chain of 16 | the same over 20 letters | 16 steps | 64 tokens: dependencies across blocks |
| chain among values | pairs such as `X=407;` between the links | seven steps | what an eviction may drop |
| few-shot | `bz:3;Tk:8;bX:3;bn:5;bq:` | `3`, what most items with `b` are | many places at once |
| sorting | `qTbz>` | `bqzT`, 16 letters in order | the whole prompt for every token |

```python
import dllm_jax as dj
from dllm_jax import embedded
from transformers import AutoTokenizer

where = embedded.path("{name}")
model, tokenizer = dj.load(where), AutoTokenizer.from_pretrained(where)
question = [{{"role": "user", "content": "b=407;T=211;z=830;k=566;T="}}]
dj.chat(model, tokenizer, question, length=4)
```

Use `length=4` (needle: three digits and end of turn; few-shot), `length=24` (sorting), `length=32` (chain),
`length=56` (needles) or `length=72` (chain of 16). Three digits were learnt
among eight and more pairs: among two or three, it may say one.

"""
PICTURES = """\
---
license: apache-2.0
library_name: dllm_jax
tags: [diffusion-language-model, llada-v, synthetic]
---
# {name}

A {parameters:,}-parameter model of LLaDA-V's architecture: a decoder of {layers} layers, {heads} heads
and width {width}, and a SigLIP tower of {tower_layers} layers and width {tower_width} over {side} x {side}
pixels in patches of {patch}. All of it was trained from nothing with LLaDA's masked-diffusion loss to answer
questions about pictures of coloured digits. It exists to test and to show decoding with images where no real
checkpoint is at hand, and to tell apart cache policies that drop or skip image tokens. It knows nothing else.

A picture shows up to five digits, red, green, blue, yellow and white. `value r` asks for the red one, and `4`
is an answer: it needs one image token of {rows}, found by its colour. A picture is one view
(`image_aspect_ratio` is "pad"), {rows} positions with the newline behind it. The published system prompt is
one token of this tokenizer.

```python
import dllm_jax as dj
from dllm_jax.tasks import ReadNumbers, examples

where = dj.embedded.path("{name}")
model, processor = dj.load(where), dj.vision.Processor.load(where)
task = ReadNumbers(digits=1, scattered=True)
question = examples(task, 0, 5, 1, "held_out")[0]  # a picture of five digits, as an array of bytes
dj.chat(model, processor, question.messages, length=2)  # question.answer
```

Use `length=2`: the digit and end of turn.

"""
BEYOND_TRAINING = """
Beyond what it was trained on, in one block:

| task | asked | prompt tokens | rope factor | prompts | exact match | guessing |
|---|---|---:|---:|---:|---:|---:|
{beyond}
"""


@dataclasses.dataclass(frozen=True)
class HeldOutPrompts:
    """Prompts of one kind.

    Attributes:
      task: where they come from.
      size: see the task.
      prompts: how many.
      length: response positions.
      guess: fraction that a model gets right which knows the form but not the look-up.
      batch: prompts decoded together.
      block: positions per block; the whole response if None.
      title: what cards call it; the task's name if empty.
    """

    task: Task
    size: int
    prompts: int
    length: int
    guess: float = 0.0
    batch: int = 32
    block: int | None = None
    title: str = ""

    @property
    def words(self) -> str:
        """The size, in words."""
        match self.task:
            case Chain(letters=letters):
                return f"{self.size} steps in a ring of {letters} letters"
            case FewShot(kinds=kinds):
                return f"{self.size} examples of each of {kinds} kinds"
            case Recall(asked=asked):
                return f"{asked} of {self.size} pairs"
            case ReadNumbers(asked=asked):
                return f"{asked} of {self.size} numbers"
            case _:
                return f"{self.size} letters"


def _needle(tokens: int, prompts: int) -> HeldOutPrompts:
    task, pairs = needle(tokens)
    batch = max(4, min(64, 8192 // tokens))
    return HeldOutPrompts(task, pairs, prompts, 4, 1 / pairs, batch, title="needle")


def _few_shot(task: FewShot, size: int, prompts: int) -> HeldOutPrompts:
    return HeldOutPrompts(task, size, prompts, 4, 1 / task.kinds)


HELD_OUT = (
    *(_needle(tokens, 256) for tokens in (64, 128, 256, 512, 1024)),
    *(HeldOutPrompts(Chain(), 7, 256, 32, block=block) for block in (4, 8, 32)),
    _few_shot(FewShot(), 5, 256),
    _few_shot(FewShot(kinds=8), 5, 256),
    HeldOutPrompts(Chain(8, values=12), 7, 256, 32, block=4, title="chain among values"),
    HeldOutPrompts(Chain(20), 16, 256, 72, block=4, title="chain of 16"),
    HeldOutPrompts(*needle(256, 8), 256, 56, block=4, title="needles"),
    HeldOutPrompts(Sorting(), 16, 256, 24, block=4),
)
PICTURED = tuple(
    HeldOutPrompts(ReadNumbers(digits=1, scattered=True), size, 256, 2, 1 / size) for size in (1, 2, 3, 5)
)
LONGER = tuple(_needle(tokens, 32) for tokens in (1536, 2048))
BEYOND = (
    *LONGER,
    HeldOutPrompts(Chain(letters=32), 7, 64, 32),
    HeldOutPrompts(Chain(), 10, 64, 41),
    _few_shot(FewShot(kinds=9), 5, 64),
)


def measure(model: Model, tokenizer: Any, kinds: tuple[HeldOutPrompts, ...]) -> list[dict[str, Any]]:
    """Accuracy on held-out prompts; one row per kind."""
    rows = []
    for kind in kinds:
        drawn = examples(kind.task, 2026, kind.size, kind.prompts, "held_out")
        score = accuracy(model, tokenizer, drawn, kind.batch, length=kind.length, block=kind.block)
        rows.append(
            {
                "task": kind.title or kind.task.name,
                "size": kind.size,
                "asked": kind.words,
                "prompt": positions(model, tokenizer, drawn[0]),
                "length": kind.length,
                "block": kind.block or kind.length,
                "count": kind.prompts,
                "exact": score,
                "guess": kind.guess,
            }
        )
    return rows


def positions(model: Model, tokenizer: Any, example: Example) -> int:
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


def text(recipe: "Recipe", run: Run, measured: dict[str, Any]) -> str:
    """README.md of a model: what it is, how it was trained, and what it answers."""
    spec, config, log, last = recipe.spec, recipe.config, run.log, run.log[-1]
    places = dict.fromkeys(round(i * (len(log) - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS))
    fields: dict[str, Any] = dict(
        name=recipe.name, parameters=count((run.model.params, run.model.vision)), layers=spec.layers,
        heads=spec.heads, width=spec.width, steps=config.steps, seed=config.seed, rate=config.learning_rate,
        muon=config.muon, warmup=config.warmup, decay=config.decay, tokens=last["tokens"] / 1e6,
        hours=last["seconds"] / 3600, speed=last["tokens"] / last["seconds"], device=device(),
        history=recipe.history, jax=jax.__version__, stages=len(recipe.stages),
        curve="\n".join(_curve_row(log[place], len(recipe.stages)) for place in places),
        table="\n".join(map(accuracy_row, measured["held_out"])),
        beyond="\n".join(map(accuracy_row, measured.get("beyond", ()))),
    )  # fmt: skip
    if (vision := spec.vision) is not None:
        fields |= dict(
            tower_layers=vision.layers, tower_width=vision.width, side=vision.image, patch=vision.patch,
            rows=vision.patches + 1,
        )  # fmt: skip
        return (PICTURES + TRAINING + ACCURACY).format(**fields)
    grouped = f", {spec.kv_heads} of keys and values" if spec.kv_heads != spec.heads else ""
    named = dict(family=spec.family, Family={"llada": "LLaDA", "dream": "Dream"}[spec.family])
    return (TEXT + TRAINING + ACCURACY + BEYOND_TRAINING).format(**fields, **named, grouped=grouped)


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
