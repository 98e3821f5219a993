"""A generation that is watched while it runs: `stream`, and the bar of `generate(progress=True)`."""

import dataclasses
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple, Unpack

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from dllm_jax.decoding.options import GenerateOptions, check_options, options_of, shows
from dllm_jax.decoding.output import Output
from dllm_jax.decoding.placement import Placed, collect, numbers, on_mesh, place, runs_on, with_auto_axes
from dllm_jax.decoding.report import report
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.features.assembly import in_order
from dllm_jax.engine.features.logprobs import Confidences, LogProbs
from dllm_jax.engine.pieces import Piece, begin_pieces, recorded_steps, resume
from dllm_jax.nn.model import Model
from dllm_jax.options import PositiveInt, check_argument
from dllm_jax.options.hints import tell
from dllm_jax.state import host, inputs

if TYPE_CHECKING:
    import rich.progress

TO_THE_END = np.iinfo(np.int32).max
UPDATES = 64  # of the bar, about so many per generation


class Snapshot(NamedTuple):
    """A generation after some of its denoising steps, as arrays on the host.

    Attributes:
      tokens: Token ids [b l], int32; mask_id where masked.
      decoded: Positions that steps unmasked, or gave another token, since the last snapshot.
      confidence: Confidence at which each position was unmasked, float32; NaN elsewhere.
      steps: Number of forward passes of each sequence so far.
      block: Index of the block, from 0, in which the slowest sequence was.
      output: Output of `generate` in the last snapshot; None before.
      logprobs: Log-probabilities so far (`LogProbs`), if `logprobs=k`; otherwise None.
      settled: Position [b] up to which the tokens of each sequence stay as they are: its first mask or stop,
        or where its block begins if the sampler may revise tokens there.
    """

    tokens: Int[np.ndarray, "b l"]
    decoded: Bool[np.ndarray, "b l"]
    confidence: Float[np.ndarray, "b l"]
    steps: Int[np.ndarray, "b"]
    block: int
    output: Output | None
    logprobs: LogProbs | None = None
    settled: Int[np.ndarray, "b"] | None = None


@shows(options_of("stream"))
def stream(
    model: Model, prompt: inputs.Ids, *, every: int | None = None, **options: Unpack[GenerateOptions]
) -> Generator[Snapshot, None, None]:
    """Decodes like `generate`, and yields the generation after every block or every few forward passes.

        for snapshot in dj.stream(model, prompt, length=128, block=32):
            print(tokenizer.decode(snapshot.tokens[0]))
        out = snapshot.output  # the output of dj.generate(model, prompt, length=128, block=32)

    Tokens, statistics, trace and log-probabilities equal those of `generate`, on CPUs bit for bit and
    elsewhere up to rounding. The loop runs in pieces of one compiled program; while the host reads one piece,
    the devices compute the next. A stream that is closed computes at most one piece beyond the last snapshot.

    Args:
      model: Model returned by `load`.
      prompt: Prompt of `generate`.
      every: Maximum number of forward passes between two snapshots. A snapshot also follows when the slowest
        sequence has finished its block. None yields only those.
      **options: Arguments of `generate`, except for `progress`.

    Yields:
      The generation so far; the last snapshot has `output`.

    Raises:
      ValueError: Invalid arguments (`generate`), or a call inside of `jit`.
      TypeError: An option that `stream` does not have.
      FloatingPointError: Logits held NaN or infinity, with nonfinite="raise".

    Warns:
      dllm_jax.engine.stats.NonFiniteWarning: Logits held NaN or infinity, with nonfinite="warn". The other
        warnings are those of `generate`.
    """
    steps = check_argument("every", every, PositiveInt | None)
    check_options("stream", options, "every")
    request = prepare(model, prompt, **options)
    tell(request.notices)
    placed = place(model, request, prompt)
    return _reported(snapshots(placed, steps), placed)


def _reported(pieces: Generator[Snapshot, None, None], placed: Placed) -> Generator[Snapshot, None, None]:
    for snapshot in pieces:
        if snapshot.output is not None:
            plan = placed.plan
            report(snapshot.output.stats, plan.policy, plan.sampler, placed.nonfinite)
        yield snapshot


def snapshots(placed: Placed, every: int | None) -> Generator[Snapshot, None, None]:
    """The snapshots of a placed request; see `stream`.

    Args:
      placed: the request.
      every: forward passes between two of them; None: blocks alone.

    Raises:
      ValueError: inside of `jit`.
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(placed)):
        raise ValueError("a generation cannot be watched inside of jit, vmap or grad")
    return _snapshots(placed, TO_THE_END if every is None else every)


def _snapshots(placed: Placed, every: int) -> Generator[Snapshot, None, None]:
    features = in_order((*placed.plan.features, Confidences()))
    run = with_auto_axes(placed._replace(plan=dataclasses.replace(placed.plan, features=features)))
    arguments, steps = (run.model, run.inputs, run.plan), numbers(np.int32(every), run.mesh)
    shown = np.s_[: run.batch, run.shown]

    # One piece is under way while the host looks at the one before it.
    before = host.everywhere(run.inputs.tokens)[shown]
    with runs_on(run):
        state, piece = resume(*arguments, begin_pieces(*arguments), steps)
    running = True
    while running:
        with runs_on(run):
            state, next_piece = resume(*arguments, state, steps)
        running = bool(host.everywhere(piece.goes_on).any())
        snapshot = _seen(piece, before, shown)
        if not running:
            # A finished generation takes no more steps: the trace after the next piece is that of this one.
            with runs_on(run):
                trace = recorded_steps(run.plan, state)
            results = on_mesh((piece.tokens, piece.stats, trace, piece.logprobs), placed.mesh)
            snapshot = snapshot._replace(output=collect(placed, *results))
        yield snapshot
        before, piece = snapshot.tokens, next_piece


def _seen(piece: Piece, before: Int[np.ndarray, "b l"], shown: tuple[slice, slice]) -> Snapshot:
    assert piece.confidence is not None, "a feature of the plan"
    tokens, confidence = (host.everywhere(array)[shown] for array in (piece.tokens, piece.confidence))
    confidence = np.where(np.isposinf(confidence), np.float32(np.nan), confidence)

    # What a sampler took back (WINO) changed as well, but has no confidence.
    changed = tokens != before if piece.unmasked is None else host.everywhere(piece.unmasked)[shown]
    decoded = changed & ~np.isnan(confidence)
    steps, block = host.everywhere(piece.steps)[shown[0]], int(host.everywhere(piece.block))
    logprobs = jax.tree.map(lambda array: host.everywhere(array)[shown], piece.logprobs)
    settled = np.minimum(host.everywhere(piece.settled)[shown[0]] - (shown[1].start or 0), tokens.shape[1])
    return Snapshot(tokens, decoded, confidence, steps, block, None, logprobs, settled)


def watched(placed: Placed) -> Output:
    """Answers a request, with a bar of decoded tokens on standard error; errors are those of `snapshots`."""
    # A sampler may need fewer steps than its schedule: the bar counts tokens, of answers as long as they are.
    pieces, decoded = snapshots(placed, math.ceil(placed.plan.layout.steps / UPDATES)), 0
    with progress_bar("denoising", "tokens, {task.fields[steps]} steps") as bar:
        task = bar.add_task("", total=None, steps=0)
        for snapshot in pieces:
            decoded += int(snapshot.decoded.sum())
            masks = int(np.sum(placed.model.spec.undecided(snapshot.tokens)))
            bar.update(task, completed=decoded, total=decoded + masks, steps=int(snapshot.steps.max()))
    assert snapshot.output is not None, "the last snapshot"
    return snapshot.output


def progress_bar(doing: str, what: str = "") -> "rich.progress.Progress":
    """A bar on standard error: what is done, how much of it, and of what."""
    import rich.console  # slow, and used by this alone
    import rich.progress as bars

    texts = bars.TextColumn(doing), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TextColumn(what)
    return bars.Progress(*texts, bars.TimeRemainingColumn(), console=rich.console.Console(stderr=True))
