"""`python -m dllm_jax`: converts the embedded checkpoints, answers prompts, prints what each policy costs.

`python -m dllm_jax chat PATH` is a conversation with a checkpoint.
"""

import dataclasses
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import jax
import rich.console
import tyro

from dllm_jax import embedded, provenance
from dllm_jax.checkpoint import convert, load
from dllm_jax.checkpoint.tokenizer import read_tokenizer
from dllm_jax.command_line import plain_errors
from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.watch.grid import END, grid
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.demo import chatting
from dllm_jax.demo.measure import Row, measure, table
from dllm_jax.nn.model import Model
from dllm_jax.nn.parameters import count
from dllm_jax.options import NonNegativeInt, Options, PositiveInt
from dllm_jax.policies import DualCache, Policy, PrefixCache
from dllm_jax.samplers import Confidence, Threshold
from dllm_jax.tasks import Chain, Example, Task, examples, needle, prompt_arrays

POLICIES = (
    (Policy(), Confidence()),
    (PrefixCache(), Confidence()),
    (DualCache(), Confidence()),
    (DualCache(), Threshold(0.9)),
)


@dataclasses.dataclass(frozen=True)
class TaskSetting:
    """One task of the demonstration: its examples' size, and length and block of their responses."""

    title: str
    task: Task
    size: int
    length: int
    block: int


TASKS = (
    TaskSetting("needle in 128 tokens", *needle(128), 4, 2),
    TaskSetting("chain of 7 look-ups", Chain(), 7, 32, 4),
)


@dataclasses.dataclass(frozen=True)
class Arguments(Options):
    """Demonstration of dllm_jax on the checkpoints that ship with it.

    `python -m dllm_jax chat PATH` is a conversation with a checkpoint instead; see `chat --help`.
    """

    models: tuple[str, ...] = embedded.TEXT
    """Which of the checkpoints that read text."""
    prompts: PositiveInt = 16
    """How many held-out prompts of each task to answer."""
    seed: NonNegativeInt = 0
    """Seed of the prompts."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table here."""

    def __post_init__(self):
        super().__post_init__()
        if unknown := [name for name in self.models if name not in embedded.TEXT]:
            raise ValueError(f"models={unknown[0]!r} must be of {', '.join(embedded.TEXT)}")


def main() -> int:
    """Entry point of `python -m dllm_jax` and of the `dllm-jax` command."""
    if sys.argv[1:2] == ["chat"]:
        with plain_errors():
            return chatting.main(sys.argv[2:])
    return demonstration(tyro.cli(Arguments))


def demonstration(arguments: Arguments) -> int:
    """Prints how the embedded checkpoints answer, and what each policy costs."""
    console = rich.console.Console()
    tables = []
    for name in arguments.models:
        model, tokenizer = _converted(console, name), read_tokenizer(embedded.path(name))
        for setting in TASKS:
            questions = examples(setting.task, arguments.seed, setting.size, arguments.prompts, "held_out")
            shape = {"length": setting.length, "block": setting.block}
            rows = measure(model, tokenizer, questions, list(POLICIES), repeats=3, **shape)
            title = f"{name}, {setting.title}: {arguments.prompts} held-out prompts, length {setting.length}"
            text = f"\n{title}, block {setting.block}\n\n{table(rows)}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            tables.append(_report(name, setting, model, rows))
        _denoising(console, model, tokenizer, questions, setting)
    device = provenance.device()
    console.print(f"{device.platform} ({device.kind}), jax {jax.__version__}")
    if arguments.json:
        arguments.json.write_text(json.dumps(_provenance(arguments) | {"tables": tables}, indent=2) + "\n")
        console.print(f"wrote {arguments.json}")
    return 0


def _converted(console: rich.console.Console, name: str) -> Model:
    """Converts an embedded Hugging Face checkpoint and loads the result from disk."""
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


def _denoising(
    console: rich.console.Console, model: Model, tokenizer, questions: list[Example], setting: TaskSetting
):
    """Prints one answer step by step."""
    prompt, mask = prompt_arrays(tokenizer, questions[:1], model.spec.eos_id)
    out = generate(model, prompt, prompt_mask=mask, length=setting.length, block=setting.block, trace=True)
    text = f"[bold]{questions[0].prompt}[/]"
    console.print(f"\n{text}  is answered (blocks of {setting.block}; {END} ends it):\n")
    console.print(grid(Recording.of(out.trace, 0), tokenizer))


def _report(name: str, setting: TaskSetting, model: Model, rows: list[Row]) -> dict:
    return {
        "model": name,
        "parameters": count(model.params),
        "dtype": str(model.dtype),
        "task": setting.title,
        "length": setting.length,
        "block": setting.block,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _provenance(arguments: Arguments) -> dict:
    return {
        "seed": arguments.seed,
        "device": provenance.device().kind,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": provenance.versions(("jax", "jaxlib", "flax", "dllm-jax")),
        "date": provenance.now(),
    }


if __name__ == "__main__":
    sys.exit(main())
