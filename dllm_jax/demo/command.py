"""`dllm-jax demo`: the bundled models answer, and a table says what each policy costs."""

import dataclasses
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import rich.box
import rich.console
import rich.table
import rich.text
import tyro

import dllm_jax as dj
from dllm_jax import provenance
from dllm_jax.command_line import keep_programs, kept_programs
from dllm_jax.decoding.watch.grid import COLD, WARM, grid
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.demo import trains
from dllm_jax.expressions import call
from dllm_jax.nn.parameters import count
from dllm_jax.options import NonNegativeInt, Options, PositiveInt, shown
from dllm_jax.tasks import Chain, Example, exact, examples, prompt_arrays

TASK = (
    'Task: follow a chain. "X>Y" means that the train runs from X to Y. The prompt lists 16 legs in random '
    'order and ends with "P>"; the answer is the route from P.'
)
EXPLANATION = """\
Policy is exact decoding: every step recomputes every token. DualCache recomputes the current block and \
reuses cached keys and values elsewhere. Threshold unmasks several tokens per step (parallel decoding).

Computed: tokens per token of the answer, before its end-of-text."""
SPEEDUP = """\
 Speedup: wall time on this device ({device}), without compilation; it differs on other devices and for \
larger models."""
NEXT = """\
  dllm-jax chat tiny-llada                talk to a model
  dllm-jax check --quick                  test this device
  https://dllm-jax.github.io/dllm_jax/    documentation"""

# Each row changes one thing: exact; with Fast-dLLM's cache; with its parallel decoding as well.
POLICIES = (
    (dj.policies.Policy(), dj.samplers.Confidence()),
    (dj.policies.DualCache(), dj.samplers.Confidence()),
    (dj.policies.DualCache(), dj.samplers.Threshold(0.9)),
)
STEPS = 7  # of a question's chain
LENGTH, BLOCK = 32, 4
COUNTED = ("answer_tokens", "computed_tokens")  # of the statistics
WIDTH = 10  # of the longest bar
WITH_BARS, WITH_SPEEDUP = 72, 66  # columns of a terminal from which on the table has them
READING = dj.bundled.TEXT + dj.bundled.BLOCK_CAUSAL


@dataclasses.dataclass(frozen=True)
class Arguments(Options):
    """Options of `dllm-jax demo`."""

    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME...")] = dj.bundled.TEXT[:1]
    """Bundled text models to run."""
    prompts: Annotated[PositiveInt, tyro.conf.arg(name="limit")] = 16
    """Number of held-out prompts."""
    seed: NonNegativeInt = 0
    """Seed of the prompts."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table here."""

    def __post_init__(self):
        super().__post_init__()
        if unknown := [name for name in self.models if name not in READING]:
            raise ValueError(f"models={shown(unknown[0])} must be of {', '.join(READING)}")


def main(arguments: Annotated[Arguments, tyro.conf.arg(name="")]) -> int:
    """Demonstrates dllm_jax on bundled checkpoints: an answer step by step, and what each policy costs."""
    console = rich.console.Console()
    device = provenance.device()
    versions = f"dllm_jax {provenance.versions(('dllm-jax',))['dllm-jax']}   jax {jax.__version__}"
    console.print(f"[bold]{versions}   {device.platform}[/]   demo on bundled models", highlight=False)
    console.print("Compiling takes most of the first run; later runs are faster.", style="dim")
    tables: list[dict[str, Any]] = []
    for name in arguments.models:
        model, tokenizer = dj.load(dj.bundled.path(name)), dj.load_tokenizer(dj.bundled.path(name))
        if not tables:
            _first_answer(console, name, model, tokenizer)
        with console.status(f"{name}: compiling, then running {len(POLICIES)} programs"):
            questions = examples(Chain(), arguments.seed, STEPS, arguments.prompts, "held_out")
            tables.append(measure(name, model, tokenizer, questions))
    prompts = f"{arguments.prompts} held-out prompts, {LENGTH} new tokens, block length {BLOCK}"
    console.print(f"[bold]2. Cost:[/] {prompts}", highlight=False)
    console.print(comparison_table(tables, console.width))
    shows_speedup = console.width >= WITH_SPEEDUP
    console.print(EXPLANATION + SPEEDUP.format(device=device.platform) * shows_speedup)
    console.print(f"\n[bold]Next:[/]\n{NEXT}\n", highlight=False, soft_wrap=True)
    console.print(kept_programs(keep_programs()), style="dim", highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(_provenance(arguments) | {"tables": tables}, indent=2) + "\n")
        console.print(f"wrote {arguments.json}")
    return 0


def _first_answer(console: rich.console.Console, name: str, model: dj.Model, tokenizer: Any):
    """Prints the question of the train, the steps of its answer, and the stops that it names."""
    console.print(f"\n{TASK}\n", highlight=False)
    console.print(f"  {trains.QUESTION}\n", style="cyan", highlight=False)
    with console.status("compiling"):
        asked = [Example(trains.QUESTION, trains.ANSWER)]
        prompt, _ = prompt_arrays(tokenizer, asked, model.spec.eos_id)
        block, sampler = model.spec.context.size or 8, dj.samplers.Threshold(0.9)
        out = dj.generate(model, prompt, length=LENGTH, block=block, sampler=sampler, trace=True)
        (answer,) = dj.decode_answers(model, tokenizer, out.tokens[:, prompt.shape[1] :])
    rule = "each step unmasks the block's tokens with confidence of at least 0.9, or the best one"
    console.print(f"[bold]1. Denoising:[/] {rule}")
    about = f"{name}, {count(model.params):,} parameters   · masked   ∎ end of text"
    picture = grid(recording := Recording.of(out.trace, 0), tokenizer, console.width, counts=True)
    # A picture that is cut into parts has no numbers at its right.
    is_whole = str(picture) != str(grid(recording, tokenizer, console.width))
    console.print(f"{about}{'   right: unmasked' * is_whole}\n", style="dim", highlight=False)
    console.print(picture)
    console.print(f"{LENGTH} tokens in {int(out.stats.nfe[0])} forward passes:", highlight=False)
    console.print(f"  {' → '.join(trains.train_route(answer))}\n", style="bold", highlight=False)


def measure(name: str, model: dj.Model, tokenizer: Any, questions: list[Example]) -> dict[str, Any]:
    """Measures each of `POLICIES` on held-out prompts; timed runs of all of them are interleaved.

    A row has the constructor calls of `policy` and `sampler`; `accuracy`, the fraction of exactly right
    answers; `forwards`, network passes per prompt; `computed`, positions that pass through the network per
    answer token (before end-of-text); `tokens_per_second`, answer tokens of the batch over the median time
    of a run, compilation excluded; `speed_up` over the first row; `compile_seconds` of tracing and compiling.
    """
    prompt, mask = prompt_arrays(tokenizer, questions, model.spec.eos_id)
    runs = [{"policy": policy, "sampler": sampler} for policy, sampler in POLICIES]
    compared = dj.compare(model, prompt, runs, prompt_mask=mask, repeats=2, length=LENGTH, block=BLOCK).rows
    rows: list[dict[str, Any]] = []
    for (policy, sampler), run in zip(POLICIES, compared, strict=True):
        texts = dj.decode_answers(model, tokenizer, run.output.tokens[:, prompt.shape[1] :])
        # Tokens before the end alone: a policy that writes more after it is not faster.
        tokens, computed = (float(np.sum(getattr(run.output.stats, kind))) for kind in COUNTED)
        row = {
            "policy": repr(policy),
            "sampler": call(sampler, always=("threshold",)),
            "accuracy": float(np.mean(exact(texts, questions))),
            "forwards": run.nfe,
            "computed": computed / max(tokens, 1),
            "tokens_per_second": tokens / run.seconds,
        }
        first = rows[0] if rows else row
        row["speed_up"] = row["tokens_per_second"] / first["tokens_per_second"]
        rows.append(row | {"compile_seconds": run.compile_seconds})
    shape = {"task": f"chain of {STEPS} look-ups", "length": LENGTH, "block": BLOCK}
    about = {"model": name, "parameters": count(model.params), "dtype": str(model.dtype)}
    return about | shape | {"rows": rows}


def _provenance(arguments: Arguments) -> dict[str, Any]:
    return {
        "seed": arguments.seed,
        "device": provenance.device().kind,
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": provenance.versions(("jax", "jaxlib", "flax", "dllm-jax")),
        "date": provenance.now(),
    }


def comparison_table(measured: list[dict[str, Any]], width: int) -> rich.table.Table:
    """Makes a table with one row per model, policy and sampler, whose numbers are never cut.

    Args:
      measured: Rows of each model (`measure`).
      width: Columns of the terminal. Below 72 the bars are left out, below 66 the speedup too.
    """
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    shown.padding = (0, 1, 0, 0)
    names = ["policy", "sampler", "accuracy", "forward\npasses", "computed\nper token"]
    names += [""] * (width >= WITH_BARS) + ["speedup"] * (width >= WITH_SPEEDUP)
    for name in names:
        shown.add_column(name, justify="left" if name in ("policy", "sampler", "") else "right", no_wrap=True)

    # Bars are of computed tokens, which are the same on every machine; times are not.
    most = max(row["computed"] for measures in measured for row in measures["rows"])
    for measures in measured:
        shown.add_row(f"[bold]{measures['model']}[/]")
        for row in measures["rows"]:
            numbers = [f"{row['accuracy']:.0%}", f"{row['forwards']:.1f}", f"{row['computed']:.0f}"]
            numbers += [_bar(row["computed"] / most)] if width >= WITH_BARS else []
            numbers += [f"{row['speed_up']:.1f}x"] if width >= WITH_SPEEDUP else []
            sampler = row["sampler"].removesuffix("()").replace("threshold=", "")
            shown.add_row(row["policy"].removesuffix("()"), sampler, *numbers)
    return shown


def _bar(share: float) -> rich.text.Text:
    """A bar as long as a share of the longest, the colder the shorter."""
    color = ",".join(str(int(part)) for part in COLD + share * (WARM - COLD))
    return rich.text.Text("█" * max(round(share * WIDTH), 1), style=f"rgb({color})")
