"""Options that all evaluations share, and the run that they share."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import rich.console
import tyro

from dllm_jax.eval.results import record, show
from dllm_jax.eval.results.schema import Row
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.part import Part
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.published import expressions

R = TypeVar("R", bound=Row)
Q = TypeVar("Q", bound=Runner)
T = TypeVar("T")
WITHOUT_PREFIX = tyro.conf.arg(name="")
JOURNAL = "journal.jsonl"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of every evaluation.

    Attributes:
      checkpoint: which checkpoint is evaluated.
      decoding: how, but for policy and sampler, which are given as text.
      policy: one or more policies, as constructor calls: 'DualCache' 'DKVDecode(refresh_every=8)'.
      sampler: a sampler, as a constructor call.
      out: folder of the results and of the journal from which an interrupted run resumes.
      part: "2/4" answers the second of four parts of the requests, into the journal in --out, and writes no
        result; `merge` puts such journals together.
    """

    checkpoint: Annotated[Checkpoint, WITHOUT_PREFIX] = Checkpoint()
    decoding: Annotated[Decoding, WITHOUT_PREFIX] = Decoding()
    policy: tuple[str, ...] = ("Policy",)
    sampler: str = "Confidence"
    out: Path = Path("runs/eval")
    part: str = "1/1"

    def with_length(self, needed: int) -> "Options":
        """These options, with the given length or else what is needed, rounded up to whole blocks."""
        return dataclasses.replace(self, decoding=self.decoding.with_length(needed))

    def decodings(self) -> dict[str, Decoding]:
        """The settings per policy, by the policy's text.

        Raises:
          ValueError: no such policy or sampler, or arguments that it refuses.
        """
        sampler = parsed(expressions.sampler, self.sampler)
        policies = {text: parsed(expressions.policy, text) for text in self.policy}
        return {
            text: dataclasses.replace(self.decoding, policy=policy, sampler=sampler)
            for text, policy in policies.items()
        }

    def evaluate(
        self,
        kind: str,
        settings: dict[str, Any],
        run: Callable[[Q, Journal], list[R]],
        draw: Callable[[list[R], Path, str], None] | None = None,
        ready: Callable[[Runner], Q] = lambda runner: runner,
    ) -> int:
        """Evaluates each policy, writes its record, and prints a table of all.

        Args:
          kind: the evaluation's name in records and file names.
          settings: its options, for the record.
          run: evaluates a runner, resuming from the journal.
          draw: writes a picture of the rows to a path, with a title; None: no picture.
          ready: makes the runner that `run` takes of one for text.

        Returns:
          the exit code: 1 if requests failed.

        Raises:
          ValueError: a record would replace one with other settings, see `record.check_replaceable`; two
            policies are one.
        """
        console = rich.console.Console()
        decodings, part = self.decodings(), Part.read(self.part)  # refused before anything is loaded
        lm, progress = self.checkpoint.open(), sys.stderr.isatty()
        runners = {text: ready(Runner(lm, decoding, progress, part)) for text, decoding in decodings.items()}
        journal = Journal(self.out / JOURNAL)
        settings = {**settings, "tokenizer": self.checkpoint.tokenizer, "seed": self.decoding.seed}
        if not part.whole:
            for runner in runners.values():
                run(runner, journal)
            console.print(f"part {self.part}: {journal.path}", highlight=False, markup=False, soft_wrap=True)
            return 0
        paths = record.paths(self.out, kind, self.policy)
        for text, runner in runners.items():
            record.check_replaceable(paths[text], kind, runner, settings)
        records = {}
        for text, runner in runners.items():
            rows, path = run(runner, journal), paths[text]
            records[text] = record.result(kind, runner, rows, settings)
            record.save(path, records[text])
            console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
            if draw is not None:
                draw(rows, path.with_suffix(".png"), f"{lm.name}, {text}")
        console.print(show.table(records, f"{kind}: {lm.name}"))
        failures = show.failures(records)
        for line in failures:
            console.print(line, style="red", markup=False)
        return 1 if failures else 0


def parsed(read: Callable[[str], T], text: str) -> T:
    """What a constructor call makes; a TypeError, of an argument of the wrong kind, becomes a ValueError."""
    try:
        return read(text)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error
