"""The training loop: step, review, log, save; resumes where a killed run stopped."""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dllm_jax.nn.model import Model
from dllm_jax.training.config import TrainConfig
from dllm_jax.training.loss import Metrics
from dllm_jax.training.run_directory import Checkpoints, LogEntry, append_to_log, rewind_log
from dllm_jax.training.source import Memory, Source
from dllm_jax.training.state import TrainState, begin, train_step

LOG = "log.jsonl"


class Run(NamedTuple):
    """The result of a run.

    Attributes:
      model: the trained model.
      memory: the source's memory at the end.
      log: one entry per review: step, mean loss and accuracy on masked tokens since the entry before,
        tokens processed and seconds so far, and the source's memory.
    """

    model: Model
    memory: Memory
    log: list[LogEntry]


def train(
    model: Model, source: Source, config: TrainConfig, *, directory: Path | None = None, progress: bool = True
) -> Run:
    """Trains a model, e.g. fine-tunes a loaded one:

        config = TrainConfig(steps=1000)
        run = train(dj.load(path), Batches(lambda step: ...), config, directory=Path("runs/a"))

    Killed and called again with the same arguments it goes on from its last checkpoint, and ends with the
    same parameters, bit for bit, as if it had not been interrupted (on the same device and software).

    Args:
      model: where to start; not changed.
      source: the batches, see `Source`; `Batches` wraps a function of the step.
      config: options.
      directory: for checkpoints and the log; None keeps everything in memory.
      progress: show a progress bar.

    Raises:
      ValueError: the directory holds a run of another model or of more steps.
      FloatingPointError: the loss is not finite.
    """
    state, memory = begin(model, config), source.begin()
    entries: list[LogEntry] = []
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            checkpoints = stack.enter_context(Checkpoints(directory / "checkpoints"))
            state, memory = checkpoints.latest(state) or (state, memory)
            entries = rewind_log(directory / LOG, int(state.step))
        if int(state.step) > config.steps:
            raise ValueError(f"steps={config.steps}: {directory} already holds step {int(state.step)}")
        bar = stack.enter_context(_bar(progress))
        return _run(_Loop(model, source, config, directory, checkpoints, bar), state, memory, entries)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What stays the same during a run."""

    model: Model
    source: Source
    config: TrainConfig
    directory: Path | None
    checkpoints: Checkpoints | None
    bar: Progress


def _run(loop: _Loop, state: TrainState, memory: Memory, entries: list[LogEntry]) -> Run:
    config, spec = loop.config, loop.model.spec
    first = int(state.step)
    task = loop.bar.add_task("training", total=config.steps, completed=first, note="")
    window, tokens, start = [], 0, time.monotonic()
    for step in range(first, config.steps):
        batch = loop.source.batch(memory, step)
        tokens += batch.prompt.size + batch.answer.size
        state, metrics = train_step(state, batch, spec, config)
        window.append(metrics)
        done = step + 1
        if done % config.review_every == 0 or done == config.steps:
            memory = loop.source.review(memory, Model(state.params, spec), done)
            entry = _entry(done, window, tokens, time.monotonic() - start, memory, entries)
            _record(loop, entry, entries)
            window, tokens, start = [], 0, time.monotonic()
        if done % config.save_every == 0 or done == config.steps:
            _save(loop, state, memory)
        loop.bar.update(task, completed=done, note=_note(entries))
    return Run(Model(state.params, spec), memory, entries)


def _entry(
    step: int, window: list[Metrics], tokens: int, seconds: float, memory: Memory, entries: list[LogEntry]
) -> LogEntry:
    loss, accuracy = (float(np.mean(values)) for values in zip(*jax.device_get(window), strict=True))
    if not math.isfinite(loss):
        raise FloatingPointError(f"the mean loss is {loss} at step {step}: try a lower learning_rate")
    before = entries[-1] if entries else {"tokens": 0, "seconds": 0.0}
    return {
        "step": step,
        "loss": round(loss, 5),
        "accuracy": round(accuracy, 5),
        "tokens": before["tokens"] + tokens,
        "seconds": round(before["seconds"] + seconds, 1),
        "source": memory,
    }


def _record(loop: _Loop, entry: LogEntry, entries: list[LogEntry]):
    entries.append(entry)
    if loop.directory is not None:
        append_to_log(loop.directory / LOG, entry)


def _save(loop: _Loop, state: TrainState, memory: Memory):
    if loop.checkpoints is not None:
        loop.checkpoints.save(state, memory)


def _note(entries: list[LogEntry]) -> str:
    if not entries:
        return ""
    last = entries[-1]
    return f"loss {last['loss']:.3f}  accuracy {last['accuracy']:.3f}  {last['source'] or ''}"


def _bar(visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}", markup=False), disable=not visible)
