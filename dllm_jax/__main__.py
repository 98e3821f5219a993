"""`python -m dllm_jax`: converts the embedded checkpoint, answers prompts, prints what each policy costs."""

import dataclasses
import datetime
import json
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import rich.console
import tyro
from transformers import AutoTokenizer

from dllm_jax import embedded
from dllm_jax.checkpoint import convert, load
from dllm_jax.demo import show
from dllm_jax.demo.measure import Questions, Row, measure, questions
from dllm_jax.generate import generate
from dllm_jax.model import Model
from dllm_jax.parameters import count
from dllm_jax.policies import DualCache, Policy, PrefixCache
from dllm_jax.samplers import Confidence, Threshold
from dllm_jax.tasks import Recall, examples

LENGTH, BLOCK = 4, 2
SIZES = ((4, 0), (8, 0), (4, 60), (8, 42), (8, 84))  # pairs and filler of a prompt, up to 128 tokens
SAMPLERS = (Confidence(), Threshold(0.9))
POLICIES = (Policy(), PrefixCache(), DualCache())


@dataclasses.dataclass(frozen=True)
class Options:
    """Demonstration of dllm_jax on the checkpoint that ships with it."""

    prompts: int = 40
    """How many held-out prompts to answer."""
    seed: int = 0
    """Seed of the prompts."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table here."""

    def __post_init__(self):
        if self.prompts < 1:
            raise ValueError(f"prompts={self.prompts} must be at least 1")


def main():
    """Entry point of `python -m dllm_jax` and of the `dllm-jax` command."""
    options = tyro.cli(Options)
    console = rich.console.Console()
    model = _converted(console)
    tokenizer = AutoTokenizer.from_pretrained(embedded.path("tiny-llada"))
    asked = _held_out(options, tokenizer, model)
    rows = [
        row
        for sampler in SAMPLERS
        for row in measure(
            model, tokenizer, asked, [(p, sampler) for p in POLICIES], length=LENGTH, block=BLOCK
        )
    ]
    rows = [dataclasses.replace(r, speed_up=r.tokens_per_second / rows[0].tokens_per_second) for r in rows]
    device = f"{jax.devices()[0].platform} ({jax.devices()[0].device_kind}), jax {jax.__version__}"
    title = f"{options.prompts} held-out recall prompts of up to {asked.prompt.shape[1]} tokens, {device}"
    console.print(show.table(rows, title))
    _denoising(console, model, tokenizer, asked)
    if options.json:
        options.json.write_text(json.dumps(_report(options, model, asked, rows), indent=2) + "\n")
        console.print(f"wrote {options.json}")


def _converted(console: rich.console.Console) -> Model:
    """The embedded Hugging Face checkpoint, through conversion and back from disk."""
    source = embedded.path("tiny-llada")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        convert(source, Path(folder) / "tiny-llada")
        model = load(Path(folder) / "tiny-llada")
        seconds = time.perf_counter() - start
    console.print(
        f"tiny-llada: {count(model.params):,} parameters, {model.dtype}, converted from its Hugging Face "
        f"checkpoint and loaded in {seconds:.1f} s"
    )
    return model


def _held_out(options: Options, tokenizer, model: Model) -> Questions:
    drawn = [
        example
        for i, (pairs, filler) in enumerate(SIZES)
        for example in examples(
            Recall(filler=filler),
            options.seed,
            pairs,
            len(range(i, options.prompts, len(SIZES))),
            "held_out",
        )
    ]
    return questions(tokenizer, drawn, model.spec.eos_id)


def _denoising(console: rich.console.Console, model: Model, tokenizer, asked: Questions):
    """One answer, step by step."""
    last = slice(len(asked.examples) - 1, None)
    out = generate(
        model, asked.prompt[last], prompt_mask=asked.mask[last], length=LENGTH, block=BLOCK, trace=True
    )
    example = asked.examples[-1]
    console.print(f"\n[bold]{example.prompt}[/]  is answered, one token per step (blocks of {BLOCK}):\n")
    assert out.trace is not None, "trace=True"
    response = np.asarray(out.trace.tokens)[:, 0, asked.prompt.shape[1] :]
    console.print(show.grid(response, model.spec.mask_id, tokenizer))


def _report(options: Options, model: Model, asked: Questions, rows: list[Row]) -> dict:
    return {
        "model": "tiny-llada",
        "parameters": count(model.params),
        "dtype": str(model.dtype),
        "prompt_shape": list(asked.prompt.shape),
        "length": LENGTH,
        "block": BLOCK,
        "seed": options.seed,
        "device": jax.devices()[0].device_kind,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "dllm-jax")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
