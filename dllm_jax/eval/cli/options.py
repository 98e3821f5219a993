"""Options that all evaluations share, and the run that they share."""

import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import rich.console
import tyro

from dllm_jax import expressions, tasks
from dllm_jax.eval.results import record, show
from dllm_jax.eval.run.files import write_json
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import Checkpoint, Decoding
from dllm_jax.options import shown
from dllm_jax.tasks.base import ChecksumSplit

WITHOUT_PREFIX = tyro.conf.arg(name="")
Difficulty = Annotated[tuple[int, ...], tyro.conf.arg(name="difficulty", metavar="INT...")]
Limit = Annotated[int, tyro.conf.arg(name="limit")]
JOURNAL = "journal.jsonl"


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Options of every evaluation.

    Attributes:
      checkpoint: Checkpoint to evaluate.
      decoding: Settings of decoding, except for the policy.
      policy: One or more policies, as constructor calls: 'DualCache' 'DKVDecode(refresh_every=8)'.
      out: Folder of the results and of the journal from which an interrupted run resumes.
      part: Shard of the requests to answer. "2/4" answers the second of four parts into the journal in --out,
        and writes no result; `merge` puts such journals together.
    """

    checkpoint: Annotated[Checkpoint, WITHOUT_PREFIX] = Checkpoint()
    decoding: Annotated[Decoding, WITHOUT_PREFIX] = Decoding()
    policy: tuple[str, ...] = ("Policy",)
    out: Path = Path("runs/eval")
    part: Annotated[str, tyro.conf.arg(name="shard", metavar="N/COUNT")] = "1/1"

    def with_length(self, needed: int) -> "EvalOptions":
        """These options, with the given length or else what is needed, rounded up to whole blocks."""
        return dataclasses.replace(self, decoding=self.decoding.with_length(needed))

    def evaluate(
        self,
        kind: str,
        settings: dict[str, Any],
        ask: Callable[[Runner], list[EvalRequest]],
        ready: Callable[[Runner], Runner] = lambda runner: runner,
    ) -> int:
        """Evaluates each policy, writes its record, of needles a heat map too, and prints a table of all.

        Args:
          kind: the evaluation's name in records and file names.
          settings: its options, for the record.
          ask: makes the requests for a runner.
          ready: makes the runner that answers of one for text.

        Returns:
          the exit code: 1 if requests failed.

        Raises:
          ImportError: a package that scores the answers is not installed.
          ValueError: a record would replace one with other settings, see `record.check_replaceable`; no such
            policy or sampler, or arguments that it refuses; two policies are one.
        """
        # What can be refused is refused before anything is loaded, or else before anything is decoded.
        number, count = part_of(self.part)
        under = lambda text: dataclasses.replace(self.decoding, policy=expressions.typed_policy(text))
        decodings = {text: under(text) for text in self.policy}
        paths = record.paths(self.out, kind, self.policy)
        lm, progress = self.checkpoint.open(), sys.stderr.isatty()
        runners = {text: ready(Runner(lm, chosen, progress)) for text, chosen in decodings.items()}
        journal = Journal(self.out / JOURNAL)
        settings = {**settings, "tokenizer": self.checkpoint.tokenizer, "seed": self.decoding.seed}
        # A part has no result of its own: its journal goes into that of the whole.
        if count > 1:
            for runner in runners.values():
                number_of = lambda request, runner=runner: int(runner.key(request)[:8], 16) % count + 1
                runner.run([request for request in ask(runner) if number_of(request) == number], journal)
            show.line(f"shard {self.part}: {journal.path}")
            return 0
        for text, runner in runners.items():
            record.check_replaceable(paths[text], kind, runner, settings)

        # Policy by policy, each record as soon as it is whole: a run that is stopped has those before.
        records = {}
        for text, runner in runners.items():
            requests, path = ask(runner), paths[text]
            record.check_scorers(requests)
            rows = record.scored(requests, runner.run(requests, journal))
            records[text] = record.result(kind, runner, rows, settings)
            write_json(path, records[text])
            show.line(f"wrote {path}")
            if any(request.cell for request in requests):
                draw = functools.partial(show.heatmap, rows, f"{lm.name}, {text}")
                show.record_picture(path.with_suffix(".png"), draw)
        rich.console.Console().print(show.record_table(records, f"{kind}: {lm.name}"))
        failed = [
            (text, row) for text, result in records.items() for row in result["requests"] if row["error"]
        ]
        for text, row in failed:
            show.line(f"{text}: {row['group']} {row['id']} failed: {row['error']}", style="red")
        return 1 if failed else 0


def task_of(text: str) -> tasks.Task:
    """The task of `dllm_jax.tasks` that a constructor call describes."""
    return expressions.construct(text, tasks, ChecksumSplit)


def part_of(text: str) -> tuple[int, int]:
    """The number of a part, from 1, and how many there are, of "2/4"; requests belong to parts by their hash.

    Hosts that share nothing but files evaluate together so: an answer does not depend on its batch.

    Raises:
      ValueError: another form, or no part of so many.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"shard={shown(text)} must be like 2/4, from 1/4 to 4/4")
    return int(match[1]), int(match[2])
