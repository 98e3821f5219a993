"""Options that all evaluations share, and the run that they share."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import rich.console
import tyro

from dllm_jax.eval.results import outputs, record, show
from dllm_jax.eval.results.schema import Row
from dllm_jax.eval.run.batches import rounded_up
from dllm_jax.eval.run.journal import Journal
from dllm_jax.eval.run.opened import OpenedModel, open_model
from dllm_jax.eval.run.runner import Runner
from dllm_jax.eval.run.settings import Decoding
from dllm_jax.published import expressions

R = TypeVar("R", bound=Row)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of every evaluation."""

    model: str = "tiny-llada"
    """An embedded model, a checkpoint's directory, or a hub id."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer, if not the model's own."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """None keeps the checkpoint's."""
    rope_factor: float = 1.0
    """Multiplies the rotary base (NTK scaling)."""
    policy: tuple[str, ...] = ("Policy",)
    """One or more policies, as constructor calls: 'DualCache' 'DKVDecode(refresh_every=8)'."""
    sampler: str = "Confidence"
    """A sampler, as a constructor call."""
    length: int | None = None
    """Response positions; None: what the task needs, in whole blocks (needle: 128)."""
    block: int | None = None
    """Positions decoded together; None: all."""
    steps: int | None = None
    """Denoising steps of each request; None: one per position."""
    stop_at_eos: bool = True
    """Finish a row at its first end-of-text."""
    seed: int = 0
    """Of the sampler's draws and of generated examples."""
    batch: int = 8
    """Rows decoded together."""
    bucket: int = 64
    """Prompts are padded to a multiple of this, so that few programs are compiled."""
    max_positions: int | None = None
    """Requests with more positions, prompt and response, fail; None: no limit."""
    out: Path = Path("runs/eval")
    """Folder of the results and of the journal from which an interrupted run resumes."""

    def with_length(self, needed: int) -> "Common":
        """These options, with the given length or else what is needed, rounded up to whole blocks."""
        chosen = rounded_up(needed, self.block or needed) if self.length is None else self.length
        return dataclasses.replace(self, length=chosen)

    def decodings(self) -> dict[str, Decoding]:
        """The settings per policy, by the policy's text.

        Raises:
          ValueError: no such policy or sampler, or arguments or sizes that it refuses.
        """
        sampler = parsed(expressions.sampler, self.sampler)
        shape = (self.length, self.block, self.steps)
        return {
            text: Decoding(*shape, parsed(expressions.policy, text), sampler, self.stop_at_eos, self.seed)
            for text in self.policy
        }

    def runner(self, opened: OpenedModel, decoding: Decoding) -> Runner:
        """Decodes with these settings."""
        limits = (self.batch, self.bucket, self.max_positions)
        return opened.runner(decoding, *limits, progress=sys.stderr.isatty())


def parsed(read: Callable[[str], T], text: str) -> T:
    """What a constructor call makes; a TypeError, of an argument of the wrong kind, becomes a ValueError."""
    try:
        return read(text)
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error


Flat = Annotated[Common, tyro.conf.arg(name="")]  # options without a prefix
DEFAULTS = Common()


def evaluate(
    common: Common,
    kind: str,
    settings: dict[str, Any],
    run: Callable[[Runner, Journal], list[R]],
    draw: Callable[[list[R], Path, str], None] | None = None,
) -> int:
    """Evaluates each policy, writes its record, and prints a table of all.

    Args:
      common: model and decoding.
      kind: the evaluation's name in records and file names.
      settings: its options, for the record.
      run: evaluates a runner, resuming from the journal.
      draw: writes a picture of the rows to a path, with a title; None: no picture.

    Returns:
      the exit code: 1 if requests failed.

    Raises:
      ValueError: a result would replace one with other settings, see `outputs.check`; two policies are one.
    """
    console = rich.console.Console()
    decodings = common.decodings()  # refused before anything is loaded
    opened = open_model(common.model, common.dtype, common.rope_factor, common.tokenizer)
    runners = {text: common.runner(opened, decoding) for text, decoding in decodings.items()}
    journal = Journal(common.out / "journal.jsonl")
    settings = {**settings, "tokenizer": common.tokenizer, "seed": common.seed}
    paths = outputs.paths(common.out, kind, common.policy)
    for text, runner in runners.items():
        outputs.check(paths[text], kind, runner, opened.name, settings)
    records = {}
    for text, runner in runners.items():
        rows, path = run(runner, journal), paths[text]
        records[text] = record.result(kind, runner, opened.name, rows, settings)
        record.save(path, records[text])
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
        if draw is not None:
            draw(rows, path.with_suffix(".png"), f"{opened.name}, {text}")
    console.print(show.table(records, f"{kind}: {opened.name}"))
    failures = show.failures(records)
    for line in failures:
        console.print(line, style="red", markup=False)
    return 1 if failures else 0
