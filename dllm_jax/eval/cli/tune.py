"""`tune`: which policy and settings are cheapest within a tolerance, on a task or on questions of a file."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import rich.console

from dllm_jax import tasks as task_module
from dllm_jax.eval.cli.options import JOURNAL, WITHOUT_PREFIX, parsed
from dllm_jax.eval.results import record
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.files import write_json
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.eval.tuning.objectives import Name
from dllm_jax.eval.tuning.questions import read_jsonl
from dllm_jax.eval.tuning.search import Search, exact_decoding
from dllm_jax.eval.tuning.tuned import Tuned
from dllm_jax.published import expressions
from dllm_jax.tasks import Example, Task, examples

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Questions:
    """Where the questions are from.

    Attributes:
      task: a task of `dllm_jax.tasks`, as a constructor call.
      sizes: of its examples.
      count: held-out examples of each size.
      questions: a file with one JSON object {"prompt": ..., "answer": ...} per line, instead of a task.
    """

    task: str = "FewShot"
    sizes: tuple[int, ...] = (5,)
    count: int = 128
    questions: Path | None = None

    def read(self, seed: int) -> list[Example]:
        """The questions.

        Raises:
          FileNotFoundError, ValueError: no such file or task, or nothing in them.
        """
        if self.questions is not None:
            return read_jsonl(self.questions)
        task = parsed(lambda text: expressions.construct(text, task_module, Task), self.task)
        return [e for size in self.sizes for e in examples(task, seed, size, self.count, "held_out")]

    @property
    def title(self) -> str:
        """A name for them."""
        return self.task.partition("(")[0] if self.questions is None else self.questions.stem


def run_tune(
    checkpoint: Annotated[Checkpoint, WITHOUT_PREFIX] = Checkpoint(),
    decoding: Annotated[Decoding, WITHOUT_PREFIX] = Decoding(),
    asked: Annotated[Questions, WITHOUT_PREFIX] = Questions(),
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
      asked: the questions.
      policy: a name stands for a grid of the policy's settings, a constructor call ('DualCache()') for that
        policy alone; none: the grids of all policies.
      sampler: of the exact decoder, as a constructor call.
      accuracy_within: how much less accurate than the exact decoder the chosen setting may be.
      objective: what is to be small: measured time, bytes moved, or bytes of the cache.
      accelerator: time is predicted for it (h100, v5e, ..) instead of measured on this device.
      first: questions of the first round; each round doubles them.
      confidence: that no setting is dropped wrongly; of the intervals.
      out: folder of the results and of the journal from which an interrupted run resumes.
    """
    search = Search(accuracy_within, objective, accelerator, first=first, confidence=confidence)
    decoding = dataclasses.replace(decoding, sampler=parsed(expressions.sampler, sampler))
    policies = [_named(text) for text in policy] or None
    questions, lm, progress = asked.read(decoding.seed), checkpoint.open(), sys.stderr.isatty()
    journal = Journal(out / JOURNAL)
    try:
        tuned = search.run(lm, questions, decoding, policies, journal, progress)
    finally:
        journal.close()
    settings = dataclasses.asdict(asked) | {
        "questions": None if asked.questions is None else str(asked.questions),
        "policy": list(policy),
        "objective": objective,
        "accelerator": accelerator,
        "first": first,
    }
    about = record.provenance(Runner(lm, exact_decoding(decoding, lm.tokenizer, questions)))
    _write(out, asked.title, tuned, {"format": FORMAT, "kind": "tune", "settings": settings, **about})
    console = rich.console.Console()
    console.print(tuned.table())
    for suffix in ("json", "toml", "png"):
        console.print(f"wrote {out / f'tune.{suffix}'}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _named(text: str) -> Any:
    """A class of policies, if the text is a name alone, else the policy that it makes."""
    made = parsed(expressions.policy, text)
    return type(made) if text.strip() == type(made).__name__ else made


def _write(out: Path, title: str, tuned: Tuned, about: dict[str, Any]):
    toml = tuned.preset_toml(title)
    write_json(out / "tune.json", about | tuned.described())
    (out / "tune.toml").write_text(toml, encoding="utf-8")
    tuned.figure().savefig(out / "tune.png", dpi=150)
