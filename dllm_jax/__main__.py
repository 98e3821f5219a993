"""`python -m dllm_jax`: converts the embedded checkpoints, answers prompts, prints what each policy costs."""

import dataclasses
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import rich.console
import tyro

from dllm_jax import embedded, provenance
from dllm_jax.checkpoint import convert, load
from dllm_jax.checkpoint.files import read_tokenizer
from dllm_jax.decoding.generate import generate
from dllm_jax.demo import show
from dllm_jax.demo.measure import Questions, Row, measure, questions
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import count
from dllm_jax.policies import DualCache, Policy, PrefixCache
from dllm_jax.samplers import Confidence, Threshold
from dllm_jax.tasks import Chain, Task, examples, needle

POLICIES = (
    (Policy(), Confidence()),
    (PrefixCache(), Confidence()),
    (DualCache(), Confidence()),
    (DualCache(), Threshold(0.9)),
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Prompts of one task, with the shape of their answers."""

    title: str
    task: Task
    size: int
    length: int
    block: int


KINDS = (Kind("needle in 128 tokens", *needle(128), 4, 2), Kind("chain of 7 look-ups", Chain(), 7, 32, 4))


@dataclasses.dataclass(frozen=True)
class Options:
    """Demonstration of dllm_jax on the checkpoints that ship with it."""

    models: tuple[str, ...] = embedded.NAMES
    """Which of the checkpoints."""
    prompts: int = 16
    """How many held-out prompts of each task to answer."""
    seed: int = 0
    """Seed of the prompts."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table here."""

    def __post_init__(self):
        for name in self.models:
            embedded.path(name)
        if self.prompts < 1:
            raise ValueError(f"prompts={self.prompts} must be at least 1")


def main():
    """Entry point of `python -m dllm_jax` and of the `dllm-jax` command."""
    options = tyro.cli(Options)
    console = rich.console.Console()
    tables = []
    for name in options.models:
        model, tokenizer = _converted(console, name), read_tokenizer(embedded.path(name))
        for kind in KINDS:
            asked = _held_out(options, kind, tokenizer, model)
            rows = measure(
                model, tokenizer, asked, list(POLICIES), length=kind.length, block=kind.block, repeats=3
            )
            title = f"{name}, {kind.title}: {options.prompts} held-out prompts, length {kind.length}"
            console.print(show.table(rows, f"{title}, block {kind.block}"))
            tables.append(_report(name, kind, model, asked, rows))
        _denoising(console, model, tokenizer, asked, kind)
    device = provenance.device()
    console.print(f"{device.platform} ({device.kind}), jax {jax.__version__}")
    if options.json:
        options.json.write_text(json.dumps(_provenance(options) | {"tables": tables}, indent=2) + "\n")
        console.print(f"wrote {options.json}")


def _converted(console: rich.console.Console, name: str) -> Model:
    """An embedded Hugging Face checkpoint, through conversion and back from disk."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        convert(embedded.path(name), Path(folder) / name)
        model = load(Path(folder) / name)
        seconds = time.perf_counter() - start
    console.print(
        f"{name}: {count(model.params):,} parameters, {model.dtype}, converted from its Hugging Face "
        f"checkpoint and loaded in {seconds:.1f} s"
    )
    return model


def _held_out(options: Options, kind: Kind, tokenizer, model: Model) -> Questions:
    drawn = examples(kind.task, options.seed, kind.size, options.prompts, "held_out")
    return questions(tokenizer, drawn, model.spec.eos_id)


def _denoising(console: rich.console.Console, model: Model, tokenizer, asked: Questions, kind: Kind):
    """One answer, step by step."""
    first = slice(0, 1)
    out = generate(
        model, asked.prompt[first], prompt_mask=asked.mask[first], length=kind.length, block=kind.block,
        trace=True,
    )  # fmt: skip
    console.print(
        f"\n[bold]{asked.examples[0].prompt}[/]  is answered (blocks of {kind.block}; {show.END} ends it):\n"
    )
    assert out.trace is not None, "trace=True"
    response = np.asarray(out.trace.tokens)[:, 0, asked.prompt.shape[1] :]
    console.print(show.grid(response, model.spec.mask_id, tokenizer))


def _report(name: str, kind: Kind, model: Model, asked: Questions, rows: list[Row]) -> dict:
    return {
        "model": name,
        "parameters": count(model.params),
        "dtype": str(model.dtype),
        "task": kind.title,
        "prompt_shape": list(asked.prompt.shape),
        "length": kind.length,
        "block": kind.block,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _provenance(options: Options) -> dict:
    return {
        "seed": options.seed,
        "device": provenance.device().kind,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": provenance.versions(("jax", "jaxlib", "flax", "dllm-jax")),
        "date": provenance.now(),
    }


if __name__ == "__main__":
    main()
