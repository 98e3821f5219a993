"""The training loop: step, review, log, save; resumes where a killed run stopped."""

import contextlib
import logging
import os
import time
from collections.abc import Collection
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dllm_jax.interrupts import uninterrupted
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument, local_path
from dllm_jax.options.hints import warn
from dllm_jax.state import host
from dllm_jax.training.batch import IGNORED, Checked, Memory, Source
from dllm_jax.training.config import TrainConfig
from dllm_jax.training.loss import Metrics
from dllm_jax.training.run_directory import Begun, LogEntry, RunDirectory, Window, check_changes, record_of
from dllm_jax.training.setup import Optimizer, Setup, Trainable, prepare
from dllm_jax.training.state import abstract_state, begin, model_of, step_on

LOG = logging.getLogger(__name__)
RESUMED = "%s: resumed from step %d of %d"


class Run(NamedTuple):
    """The result of a run.

    Attributes:
      model: the trained model.
      memory: the source's memory at the end.
      log: one entry per review: step, mean loss and accuracy (`Metrics`) since the entry before, tokens
        processed and seconds so far, and the source's memory.
    """

    model: Model
    memory: Memory
    log: list[LogEntry]


def train(
    model: Model,
    source: Source,
    config: TrainConfig,
    *,
    directory: str | os.PathLike[str] | None = None,
    optimizer: Optimizer | None = None,
    trainable: Trainable | None = None,
    mesh: Mesh | None = None,
    allow_changes: Collection[str] = (),
    progress: bool = True,
) -> Run:
    """Trains a model and returns it with its log.

        config = TrainConfig(steps=1000)
        run = train(dj.load(path), Batches(lambda step: ...), config, directory="runs/a")

    Call it again with the same arguments after a kill: it continues from its last checkpoint. On the same
    CPUs and software the parameters are those of a run without interruption, bit for bit; on GPUs, whose
    sums may change their order, and on another mesh up to rounding.

    Args:
      model: Initial model; not changed.
      source: Batches by step, `Batches(function)`, or your own `Source`.
      config: Steps, learning rate and other numbers.
      directory: Directory of checkpoints and the log, of one run at a time; None keeps everything in memory.
      optimizer: Transformation of optax. Default: AdamW, or Muon, as `config` says. It receives the trained
        parameters only, in float32 with `TrainConfig.master_weights`. Or a mapping from names in `trainable`
        to transformations, None for frozen parameters.
      trainable: Parameters to train: a tree of True and False (or of names), such as
        `{"embed": False, "layers": True, "norm": True, "head": False}`, or a function that returns one for
        the parameters, such as `lora.trainable`. Default: the whole decoder, of models without LoRA adapters.
        True also trains the vision tower and projector of LLaDA-V ("vision" in the tree). Frozen parameters
        have no gradient and no state, and are in no checkpoint.
      mesh: Devices to train on: axes "dp", "data" or "batch" split the batch, "fsdp" batch and parameters,
        "tp", "model" or "tensor" layers and vocabulary, "ep" or "expert" experts
        (`dllm_jax.training.placement`). Default: the model's mesh, that of `jax.set_mesh`, or one device.
        Several processes all call `train` with the same arguments, and the source gives each of them the
        whole batch.
      allow_changes: Names of options that may differ from those of the directory's run: fields of
        `TrainConfig`, "optimizer", "trainable", ...
      progress: Whether to show a progress bar.

    Raises:
      ValueError: another run trains in the directory, or it holds a run of another model, of more steps or
        with another configuration, or a `log.jsonl` of something else; options that do not go together, or
        not with the model; a batch that does not fit the model, or that mesh and `accumulate` do not divide.
      TypeError: `optimizer` is not a transformation of optax.
      OSError: the directory cannot be made, or its log cannot be written or locked.
      FloatingPointError: the loss is not finite.
      KeyboardInterrupt: Ctrl-C; if there is a directory, with a message that says which step it holds. A
        checkpoint that is being written is finished first.
    """
    check_argument("source", source, Source, ", such as Batches(lambda step: batch)")
    check_argument("directory", directory, str | os.PathLike | None)
    check_argument("progress", progress, bool)
    setup = prepare(model, config, optimizer=optimizer, trainable=trainable, mesh=mesh)
    record = record_of(model, setup, trainable, optimizer is not None)
    allowed = check_changes(allow_changes, record)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(progress))
        if directory is None:
            return _run(model, source, setup, None, bar, _begin(model, source, setup))
        # A directory that holds a checkpoint decides where to begin; its configuration must be this one.
        with uninterrupted():
            files = stack.enter_context(RunDirectory(local_path("directory", directory), record))
            if files.step is None:
                begun = _begin(model, source, setup)
            else:
                begun = files.resume(abstract_state(model, setup), allowed)
                LOG.info(RESUMED, directory, files.step, config.steps)
                if progress:
                    bar.console.print(RESUMED % (directory, files.step, config.steps), soft_wrap=True)
        # Entries after the checkpoint were written before a kill: they come again.
        files.write_log(begun.entries, "w")
        try:
            return _run(model, source, setup, files, bar, begun)
        except KeyboardInterrupt:
            bar.stop()
            state_of_run = f"{directory} holds the run up to step {files.step or 0} of {config.steps}"
            raise KeyboardInterrupt(
                f"interrupted: {state_of_run}. Call train again with the same arguments to go on"
            ) from None


def _run(
    model: Model,
    source: Source,
    setup: Setup,
    files: RunDirectory | None,
    bar: Progress,
    begun: Begun,
) -> Run:
    """The steps that are left: each a batch and a `train_step`, some with a review or a checkpoint after."""
    config, (state, memory, entries, (window, tokens, seconds)) = setup.config, begun
    first, start, warned = int(state.step), time.monotonic() - seconds, False
    task = bar.add_task("training", total=config.steps, completed=first, note="")
    for step in range(first, config.steps):
        batch = _batch(source, memory, step, setup)
        warned = warned or _warn_of_nothing(batch, step, setup)
        tokens += batch.prompt.size + batch.answer.size
        with uninterrupted():  # XLA may be compiling, and ends the process if Python does meanwhile
            state, metrics = step_on(state, batch, setup)

        # Metrics stay on the devices until a review: to read them here would be to wait for every step.
        window.append(metrics)
        done, last = step + 1, step + 1 == config.steps
        if done % config.review_every == 0 or last:
            memory = source.review(memory, model_of(model, state, setup), done)
            measured = Window(_on_host(window, done), tokens, time.monotonic() - start)
            entries.append(_entry(done, measured, memory, entries))
            window, tokens, start = [], 0, time.monotonic()
            if files is not None:
                files.write_log(entries[-1:], "a")
        if files is not None and (done % config.save_every == 0 or last):
            window = _on_host(window, done)
            with uninterrupted():
                measured = Window(window, tokens, time.monotonic() - start)
                files.save(Begun(state, memory, entries, measured))
        bar.update(task, completed=done, note=_note(entries))
    return Run(model_of(model, state, setup), memory, entries)


def _begin(model: Model, source: Source, setup: Setup) -> Begun:
    """The beginning of a run that holds no checkpoint."""
    return Begun(begin(model, setup), source.begin(), [], Window([]))


def _batch(source: Source, memory: Memory, step: int, setup: Setup) -> Checked:
    """The batch of a step, checked; errors name the step."""
    given = source.batch(memory, step)
    try:
        return setup.batch(given)
    except ValueError as error:
        raise ValueError(f"the batch of step {step}: {error}") from error


def _warn_of_nothing(batch: Checked, step: int, setup: Setup) -> bool:
    """Warns of a batch without any answer token that counts; returns whether it has none."""
    known = None if batch.answer_mask is None else host.readable(batch.answer_mask)
    if known is None or known.any():
        return False
    warn(
        f"the batch of step {step} has no answer token that counts (all are {IGNORED} or padding): it "
        "teaches nothing, and the optimizer's momentum and weight decay alone move the weights. "
        "Look for prompts that truncation leaves no answer. This is said once"
    )
    return True


def _on_host(window: list[Metrics], step: int) -> list[Metrics]:
    """The metrics of the steps up to this one, read from the devices; raises unless all losses are finite."""
    window = jax.device_get(window)
    losses = np.asarray([metrics.loss for metrics in window])
    if not np.isfinite(losses).all():
        first = step - len(window) + int(np.argmin(np.isfinite(losses))) + 1
        fix = "Try a lower learning rate or stronger clipping"
        if first == 1:
            fix = "No update came before it: weights or activations of the model are not finite"
        raise FloatingPointError(
            f"the loss is {losses[first - 1 - step]} at step {first}. Its batch was checked: ids are in the "
            f"vocabulary, masks are 0 or 1, padding is on its side. {fix}"
        )
    return window


def _entry(step: int, window: Window, memory: Memory, entries: list[LogEntry]) -> LogEntry:
    loss, accuracy = (float(np.mean(column)) for column in zip(*window.metrics, strict=True))
    # Totals go on from the entry before, which may be that of a process that was killed.
    before = entries[-1] if entries else {"tokens": 0, "seconds": 0.0}
    return {
        "step": step,
        "loss": round(loss, 5),
        "accuracy": round(accuracy, 5),
        "tokens": before["tokens"] + window.tokens,
        "seconds": round(before["seconds"] + window.seconds, 1),
        "source": memory,
    }


def _note(entries: list[LogEntry]) -> str:
    if not entries:
        return ""
    last = entries[-1]
    return f"loss {last['loss']:.3f}  accuracy {last['accuracy']:.3f}  {last['source'] or ''}"


def _bar(visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[note]}", markup=False), disable=not visible)
