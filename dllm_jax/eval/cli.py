"""The commands of `python -m dllm_jax.eval`."""

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import rich.markup
import tyro

from dllm_jax import tasks as task_module
from dllm_jax.eval import heatmap, longbench, needle, recall, record, settings, show, tasks
from dllm_jax.eval.compare import compare as compare_records
from dllm_jax.eval.compare import tables
from dllm_jax.eval.journal import Journal
from dllm_jax.eval.longbench import evaluate as longbench_run
from dllm_jax.eval.opened import Opened, open_checkpoint
from dllm_jax.eval.runner import Runner
from dllm_jax.tasks import Task

Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Common:
    """What every evaluation needs to know."""

    model: str = "tiny-llada"
    """An embedded model, a checkpoint's directory, or a hub id."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None keeps the checkpoint's."""
    rope_factor: float = 1.0
    """Multiplies the rotary base (NTK scaling)."""
    policy: tuple[str, ...] = ("Policy",)
    """One or more policies, as constructor calls: 'DualCache' 'DKVDecode(refresh_every=8)'."""
    sampler: str = "Confidence"
    """A sampler, as a constructor call."""
    length: int = 128
    """Response positions (LongBench sets its own per task)."""
    block: int | None = None
    """Positions decoded together; None for all."""
    steps: int | None = None
    """Denoising steps in all; None for one per token."""
    stop_at_eos: bool = True
    """Finish a row at its first end-of-text."""
    seed: int = 0
    """Of the sampler's draws and of generated examples."""
    batch: int = 8
    """Rows decoded together."""
    bucket: int = 64
    """Prompts are padded to a multiple of this, so that few programs are compiled."""
    max_positions: int | None = None
    """Requests with more positions, prompt and response, fail."""
    out: Path = Path("runs/eval")
    """Folder of the results; a run that was interrupted resumes from its journal."""

    def runners(self, opened: Opened) -> dict[str, Runner]:
        """A runner per policy, by the policy's text."""
        sampler = settings.sampler(self.sampler)
        shape = (self.length, self.block, self.steps)
        return {
            text: Runner(
                opened.model,
                opened.tokenizer,
                settings.Decoding(*shape, settings.policy(text), sampler, self.stop_at_eos, self.seed),
                opened.identity,
                self.batch,
                self.bucket,
                self.max_positions,
                progress=sys.stderr.isatty(),
            )
            for text in self.policy
        }


Flat = Annotated[Common, tyro.conf.arg(name="")]


def run_tasks(
    common: Flat = Common(),
    task: str = "Recall",
    sizes: tuple[int, ...] = (2, 4, 8),
    count: int = 32,
) -> int:
    """Exact match on held-out examples of a task of `dllm_jax.tasks`, for each policy.

    Args:
      common: model and settings.
      task: the task, as a constructor call.
      sizes: sizes of its examples.
      count: examples of each size.
    """
    chosen = settings.construct(task, task_module, Task)
    asked = {"task": repr(chosen), "sizes": list(sizes), "count": count}
    run = lambda runner, journal: tasks.evaluate(runner, chosen, sizes, count, common.seed, journal)
    return _evaluate(common, "tasks", asked, run)


def run_longbench(
    data: Path,
    common: Flat = Common(),
    prompts: Path | None = None,
    tasks: tuple[str, ...] = (),
    max_length: int | None = None,
    limit: int | None = None,
    answer_length: int | None = None,
) -> int:
    """LongBench's English tasks, from a local copy of the data set.

    Args:
      data: the folder with <task>.jsonl.
      common: model and settings.
      prompts: LongBench's dataset2prompt.json; default: the one in the data folder.
      tasks: which tasks; default: all 16.
      max_length: longer prompts lose their middle (published: 3500, 7500, 15500, 31500 tokens).
      limit: only the first samples of each task.
      answer_length: response positions for every task instead of the published ones.
    """
    read = longbench.Prompts.read(prompts or data / longbench.FILE)
    chosen = longbench_run.tasks(tasks)
    asked = {
        "tasks": [task.name for task in chosen],
        "prompts_sha256": read.sha256,
        "max_length": max_length,
        "limit": limit,
        "answer_length": answer_length,
    }
    run = lambda runner, journal: longbench_run.evaluate(
        runner, data, read, chosen, max_length, limit, answer_length, journal
    )
    return _evaluate(common, "longbench", asked, run)


def run_needle(
    common: Flat = Common(),
    haystack: Path | None = None,
    lengths: tuple[int, ...] = (1000, 2000, 4000),
    depths: tuple[float, ...] = (0.0, 11.0, 22.0, 33.0, 44.0, 56.0, 67.0, 78.0, 89.0, 100.0),
    scoring: needle.Scoring | None = None,
    buffer: int | None = None,
    needle_file: Path | None = None,
    chat: bool = False,
    repeats: int | None = None,
) -> int:
    """Needle in a haystack, length by depth; without a haystack, over key-value recall.

    Args:
      common: model and settings.
      haystack: a text file, or a folder of .txt files; None hides a pair among pairs and filler (`Recall`),
        in the chat template, exactly scored, in prompts of exactly the lengths.
      lengths: of prompts, in tokens.
      depths: in percent.
      scoring: of text: rouge (DuoAttention; default) or keyword (LongLLaDA).
      buffer: of text: tokens of the length left to question and answer; default 200, for keyword 600.
      needle_file: JSON with text, question, keyword and template instead of DuoAttention's needle.
      chat: wrap prompts of text in the chat template.
      repeats: examples per cell of recall (default 4); a cell of text is a single prompt.
    """
    text_only = {"scoring": scoring, "buffer": buffer, "needle-file": needle_file, "chat": chat or None}
    _refuse({"repeats": repeats} if haystack else text_only, haystack)
    if haystack is None:
        repeats = 4 if repeats is None else repeats
        asked = {"lengths": lengths, "depths": depths, "repeats": repeats}
        run = lambda runner, journal: recall.evaluate(runner, lengths, depths, repeats, common.seed, journal)
        return _evaluate(common, "recall", asked, run, unit="length in tokens")
    hidden = needle.DUO_ATTENTION if needle_file is None else needle.read(needle_file)
    scoring = scoring or "rouge"
    margin = {"rouge": 200, "keyword": 600}[scoring] if buffer is None else buffer
    hidden = dataclasses.replace(hidden, scoring=scoring, buffer=margin)
    text = needle.haystack(haystack)

    def run(runner: Runner, journal: Journal) -> Rows:
        encode = lambda prompt: (
            tasks.chat_ids(runner.tokenizer, prompt, runner.model.spec.eos_id)
            if chat
            else runner.tokenizer(prompt)["input_ids"]
        )
        return needle.evaluate(runner, hidden, text, lengths, depths, encode, journal)

    asked = {"lengths": lengths, "depths": depths, "chat": chat, **dataclasses.asdict(hidden)}
    return _evaluate(common, "needle", asked, run, unit="length in tokens")


def _refuse(options: dict[str, Any], haystack: Path | None):
    """Raises for the first option that is given, though it would have no effect."""
    for name, value in options.items():
        if value is not None:
            why = (
                "over recall, which has its own pairs, score and chat template; give a --haystack"
                if haystack is None
                else f"with --haystack {haystack}: each length and depth is a single prompt"
            )
            raise ValueError(f"--{name} {value} has no effect {why}")


def run_compare(
    a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], confidence: float = 0.95, seed: int = 0
) -> int:
    """Differences of two results with bootstrap confidence intervals, paired over requests.

    Args:
      a: a result, JSON.
      b: another one of the same evaluation.
      confidence: of the intervals.
      seed: of the resampling.
    """
    console = rich.console.Console()
    found = compare_records(record.read(a), record.read(b), confidence, seed=seed)
    for table in tables(found, (str(a), str(b)), confidence):
        console.print(table)
    console.print(
        f"{found.same:.1%} of the answers are the same; {found.unpaired} requests without a partner"
    )
    return 0


def _evaluate(
    common: Common,
    kind: str,
    asked: dict[str, Any],
    run: Callable[[Runner, Journal], Rows],
    unit: str | None = None,
) -> int:
    """Runs each policy, writes a record (and a heat map, if there is a unit) each, prints the table."""
    console = rich.console.Console()
    opened = open_checkpoint(common.model, common.dtype, common.rope_factor, common.tokenizer)
    runners = common.runners(opened)
    journal = Journal(common.out / "journal.jsonl")
    records = {}
    for text, runner in runners.items():
        rows = run(runner, journal)
        records[text] = record.result(kind, runner, opened.name, rows, {**asked, "seed": common.seed})
        path = common.out / f"{kind}-{re.sub(r'[^A-Za-z0-9_.]+', '-', text).strip('-')}.json"
        record.save(path, records[text])
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
        if unit is not None:
            heatmap.draw(rows, path.with_suffix(".png"), f"{opened.name}, {text}", unit)
    console.print(show.table(records, f"{kind}: {opened.name}"))
    failures = show.failures(records)
    for line in failures:
        console.print(line, style="red", markup=False)
    return 1 if failures else 0
