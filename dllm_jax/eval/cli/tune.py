"""`tune`: which policy and settings are cheapest within a tolerance, on a task or on questions of a file."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import rich.console

from dllm_jax.eval.cli.options import JOURNAL, WITHOUT_PREFIX, task_of
from dllm_jax.eval.results import record, show
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.files import write_json
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.eval.tuning.objectives import Name
from dllm_jax.eval.tuning.questions import read_jsonl
from dllm_jax.eval.tuning.search import Search, exact_decoding
from dllm_jax.published import expressions
from dllm_jax.tasks import examples

FORMAT = 1


def run_tune(
    checkpoint: Annotated[Checkpoint, WITHOUT_PREFIX] = Checkpoint(),
    decoding: Annotated[Decoding, WITHOUT_PREFIX] = Decoding(),
    task: str = "FewShot",
    sizes: tuple[int, ...] = (5,),
    count: int = 128,
    questions: Path | None = None,
    policy: tuple[str, ...] = (),
    sampler: str = "Confidence",
    accuracy_within: float = 0.01,
    objective: Name = "time",
    accelerator: str | None = None,
    first: int = 16,
    confidence: float = 0.95,
    out: Path = Path("runs/tune"),
) -> int:
    """The cheapest policy and settings that are about as accurate as the exact decoder.

    Writes tune.json (all rows), tune.toml (the chosen preset) and tune.png (accuracy by cost) to --out.

    Args:
      checkpoint: which checkpoint.
      decoding: of the exact decoder; other settings differ from it in policy, sampler, block or steps.
      task: a task of `dllm_jax.tasks`, as a constructor call.
      sizes: of its examples.
      count: held-out examples of each size.
      questions: a file with one JSON object {"prompt": ..., "answer": ...} per line, instead of a task.
      policy: a name stands for a grid of the policy's settings, a constructor call ('DualCache()') for that
        policy alone; none: the grids of all policies.
      sampler: of the exact decoder, as a constructor call.
      accuracy_within: how much less accurate than the exact decoder the chosen setting may be.
      objective: what is to be small: measured time, or bytes moved.
      accelerator: time is predicted for it (h100, v5e, ..) instead of measured on this device.
      first: questions of the first round; each round doubles them.
      confidence: that no setting is dropped wrongly; of the intervals.
      out: folder of the results and of the journal from which an interrupted run resumes.
    """
    search = Search(accuracy_within, objective, accelerator, first=first, confidence=confidence)
    decoding = dataclasses.replace(decoding, sampler=expressions.sampler(sampler))
    made = {text: expressions.policy(text) for text in policy}
    # A name alone is a class of policies, which stands for its grid.
    policies = [type(p) if text.strip() == type(p).__name__ else p for text, p in made.items()] or None
    if questions is None:
        chosen, seed = task_of(task), decoding.seed
        asked = [e for size in sizes for e in examples(chosen, seed, size, count, "held_out")]
    else:
        asked = read_jsonl(questions)

    lm, progress = checkpoint.open(), sys.stderr.isatty()
    tuned = search.run(lm, asked, decoding, policies, Journal(out / JOURNAL), progress)
    settings = {
        "task": task,
        "sizes": sizes,
        "count": count,
        "questions": None if questions is None else str(questions),
        "policy": policy,
        "objective": objective,
        "accelerator": accelerator,
        "first": first,
    }
    about = record.provenance(Runner(lm, exact_decoding(decoding, lm.tokenizer, asked)))
    title = task.partition("(")[0] if questions is None else questions.stem
    # A preset that cannot be written is found out before any file is.
    toml = tuned.preset_toml(title)
    head = {"format": FORMAT, "kind": "tune", "settings": settings, **about}
    write_json(out / "tune.json", head | tuned.described())
    (out / "tune.toml").write_text(toml, encoding="utf-8")
    tuned.figure().savefig(out / "tune.png", dpi=150)
    rich.console.Console().print(tuned.table())
    for suffix in ("json", "toml", "png"):
        show.line(f"wrote {out / f'tune.{suffix}'}")
    return 0
