"""Directory of a training run: checkpoints (Orbax) and a log (JSON lines), written and read on resuming.

A checkpoint holds the run's configuration, a `Record`, with which that of a resumed run is compared.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree

from dllm_jax import locks
from dllm_jax.nn.keys import THREEFRY
from dllm_jax.nn.low_rank import adapted
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument, shown
from dllm_jax.processes import by_the_first
from dllm_jax.training.batch import Memory
from dllm_jax.training.loss import Metrics
from dllm_jax.training.setup import Setup, Trainable, labels, trained_parameters
from dllm_jax.training.state import TrainState

RunRecord = dict[str, Any]
LogEntry = dict[str, Any]
STATE, SOURCE, CONFIGURATION, LOG = "state", "source", "configuration", "log"
LOG_FILE = "log.jsonl"
BEGINNING = b'{"step": '  # of a log
KEPT = 2  # checkpoints
# Options that change no step that was done, but for rounding. "steps" and "decay" are compared by the rates
# that they gave.
FREE = ("steps", "decay", "save_every", "accumulate", "remat")


class Window(NamedTuple):
    """The steps since the newest entry of the log.

    Attributes:
      metrics: Metrics of each step, on the devices or on the host.
      tokens: Number of tokens in the batches.
      seconds: Duration up to when it was saved.
    """

    metrics: list[Metrics]
    tokens: int = 0
    seconds: float = 0.0


class Begun(NamedTuple):
    """Where a run begins: at its start, or at the newest checkpoint.

    Attributes:
      state: Parameters, optimizer's state, step and key.
      memory: Memory of the source.
      entries: Log up to the step.
      window: Steps after the newest entry.
    """

    state: TrainState
    memory: Memory
    entries: list[LogEntry]
    window: Window


class RunDirectory:
    """The checkpoints of a run, and its log.

    A checkpoint holds trained parameters, optimizer's state, step, key, the source's memory, the
    configuration and the log so far; `log.jsonl` next to them is for people. A context manager. Orbax writes
    next to the target and renames, so a run killed at any moment leaves complete checkpoints only. With
    several processes all call every method, and each writes and reads what its devices hold.

    One run at a time has a directory. Its first process holds the lock of `log.jsonl`, which the system takes
    back when that process ends, however it ends.

    Raises:
      ValueError: another run trains in the directory, or its `log.jsonl` is none of a run.
      OSError: the directory or the log cannot be made.
    """

    def __init__(self, root: Path, record: RunRecord):
        root.mkdir(parents=True, exist_ok=True)
        self._root, self._record, self._log = root, record, root / LOG_FILE
        self._folder = root.absolute() / "checkpoints"
        with contextlib.ExitStack() as stack:
            # Claimed before Orbax looks at the checkpoints: it removes those that are being written.
            _claim(self._log, stack)
            options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
            handlers = {name: ocp.JsonCheckpointHandler() for name in (SOURCE, CONFIGURATION, LOG)}
            handlers = {STATE: ocp.StandardCheckpointHandler(), **handlers}
            self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)
            stack.callback(self._manager.close)
            self._held = stack.pop_all()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: object):
        self._held.close()

    @property
    def step(self) -> int | None:
        """Optimizer steps done in the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    @number_modes()
    def save(self, done: Begun):
        """Writes a checkpoint of the state's step, and removes all but the newest `KEPT`.

        Args:
          done: What a run that goes on begins with; metrics on the host.
        """
        columns = {
            name: [float(getattr(metrics, name)) for metrics in done.window.metrics]
            for name in Metrics._fields
        }
        window = columns | {"tokens": done.window.tokens, "seconds": done.window.seconds}
        args = {
            STATE: ocp.args.StandardSave(_saved(done.state)),
            SOURCE: ocp.args.JsonSave(done.memory),
            CONFIGURATION: ocp.args.JsonSave(self._record),
            LOG: ocp.args.JsonSave({"entries": done.entries, "window": window}),
        }
        self._manager.save(int(done.state.step), args=ocp.args.Composite(**args))

    @number_modes()
    def resume(self, like: TrainState, allowed: Collection[str]) -> Begun:
        """Restores the newest checkpoint.

        Args:
          like: a state of the same shapes, which may be abstract, whose shardings the restored one gets: on
            any mesh, whatever mesh the checkpoint was written from.
          allowed: options that may differ from those that the run was begun with, by name.

        Raises:
          ValueError: the checkpoint is of more steps or another configuration, or holds other arrays (another
            model, optimizer or trainable).
        """
        done, steps = self.step, self._record["steps"]
        assert done is not None, "called where there is a checkpoint"
        if done > steps:
            raise ValueError(f"steps={steps}: {self._root} already holds step {done}")
        read = lambda **items: self._manager.restore(done, args=ocp.args.Composite(**items))
        before = read(**{CONFIGURATION: ocp.args.JsonRestore()})[CONFIGURATION]
        check_unchanged(before, self._record, done, allowed)
        # Names, shapes and dtypes are compared first: Orbax would cast and broadcast in silence.
        shapes, places = jax.eval_shape(_saved, like), like._replace(key=like.step)._asdict()
        put = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at.sharding)
        wanted = {name: jax.tree.map(put, shapes[name], places[name]) for name in shapes}
        old, new = _arrays(self._manager.item_metadata(done)[STATE]), _arrays(wanted)
        for name in new | old:
            there, here = old.get(name, "absent"), new.get(name, "absent")
            if there != here:
                raise ValueError(
                    f"{self._root} holds another model, optimizer or trainable: {name} is {there} there, "
                    f"{here} here"
                )
        # Checkpoints of 0.2.0 hold no log: its lines are in the file.
        within = (self._folder / str(done) / LOG).exists()
        items = {name: ocp.args.JsonRestore() for name in ((SOURCE, LOG) if within else (SOURCE,))}
        restored = read(**{STATE: ocp.args.StandardRestore(wanted), **items})
        saved = restored[STATE]
        key = jax.random.wrap_key_data(saved["key"], impl=THREEFRY)
        state = TrainState(**(saved | {"key": key}), frozen=like.frozen)
        log: dict[str, Any] = restored[LOG] if within else {"entries": self._lines(done)}
        return Begun(state, restored[SOURCE], log["entries"], _window(log.get("window")))

    def _lines(self, done: int) -> list[LogEntry]:
        """The entries of `log.jsonl` up to a step; a line that a killed run did not end is left out."""
        lines = self._log.read_text(encoding="utf-8-sig").splitlines(keepends=True)
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry for entry in entries if entry["step"] <= done]

    def write_log(self, entries: list[LogEntry], mode: Literal["w", "a"]):
        """Writes entries to `log.jsonl`, a line each: in place of what is there ("w"), or after it ("a")."""
        if jax.process_index() == 0:
            with self._log.open(mode, encoding="utf-8") as out:
                out.writelines(json.dumps(entry) + "\n" for entry in entries)


def _window(saved: dict[str, Any] | None) -> Window:
    """Steps that a checkpoint has no entry for; older ones hold none."""
    if saved is None:
        return Window([])
    columns = zip(*(map(np.float32, saved[name]) for name in Metrics._fields), strict=True)
    return Window([Metrics(*each) for each in columns], saved["tokens"], saved["seconds"])


def _claim(log: Path, stack: contextlib.ExitStack):
    """Lets the first process lock a run's log until `stack` is closed.

    Raises:
      ValueError: another run holds it, or it is none of a run.
      OSError: it cannot be locked, or the first process could not lock it.
    """

    def hold():
        try:
            log.touch()
            stack.enter_context(locks.hold(log))
        except BlockingIOError:
            raise ValueError(
                f"directory={shown(str(log.parent))} is in use: another run trains in it. Wait until it has "
                "ended, or choose another directory."
            ) from None
        with log.open("rb") as file:
            start = file.read(len(BEGINNING) + 3).removeprefix(codecs.BOM_UTF8)[: len(BEGINNING)]
            # Zeros are what a machine that stopped leaves.
            if not BEGINNING.startswith(start.rstrip(b"\0")):
                raise ValueError(
                    f"directory={shown(str(log.parent))} has a {log.name} that is none of a run, which would "
                    f"replace it: it begins with {start!r}. Choose another directory."
                )

    by_the_first(hold, f"{log.parent} was not claimed")


def _saved(state: TrainState) -> dict[str, Any]:
    """Selects the state that a checkpoint holds: all but frozen parameters, with the key as numbers."""
    fields = state._replace(key=jax.random.key_data(state.key))._asdict()
    return {name: part for name, part in fields.items() if name != "frozen"}


def _arrays(tree: Any) -> dict[str, str]:
    """Arrays by path, in words: `float32[2, 3]`."""
    words = lambda leaf: f"{jax.numpy.dtype(leaf.dtype)}{list(leaf.shape)}"
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): words(leaf) for path, leaf in leaves}


@number_modes()
def record_of(model: Model, setup: Setup, trainable: Trainable | None, replaced: bool) -> RunRecord:
    """The configuration as JSON: options, optimizer, what is trained, and the model.

    Args:
      model: Model to train.
      setup: Setup of the run.
      trainable: Parameters to train, as given to `prepare`.
      replaced: whether the optimizer is another one than the config describes.
    """
    params = trained_parameters(model)
    trained, frozen = setup.split(params)
    paths = jax.tree_util.tree_leaves_with_path(labels(params, trainable))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): label for path, label in paths}
    spec = {f"spec.{name}": value for name, value in dataclasses.asdict(setup.spec).items()}
    record = dataclasses.asdict(setup.config) | {
        "warmup": setup.config.warmup_steps,
        "optimizer": _digest(setup, trained) if replaced else None,
        "trainable": None if all(label is True for label in named.values()) else named,
        "dtype": "/".join(sorted({str(dtype) for dtype in setup.dtypes})),
        "frozen": int(checksum(frozen)),  # which checkpoints do not hold
        "alpha": sorted({matrix.alpha for matrix in adapted(params)}) or None,  # which no array holds
    }
    # As it is read again: tuples, also those inside of the spec, are lists.
    return json.loads(json.dumps(record | spec))


def check_unchanged(old: RunRecord, new: RunRecord, step: int, allowed: Collection[str]):
    """Compares the configuration of a checkpoint with the one that goes on from it.

    Args:
      old: Configuration of the checkpoint.
      new: Configuration of the run.
      step: optimizer steps done.
      allowed: names that may differ.

    Raises:
      ValueError: what differs, with both values.
    """
    # What cannot have changed a step that was done is free; the schedule is compared by the rates it gave.
    changed = [name for name in new if old.get(name) != new[name] and name not in FREE]
    if any(record["steps"] - record["decay"] < step for record in (old, new)):
        changed += [name for name in ("steps", "decay") if old.get(name) != new[name]]
    changed = [name for name in changed if name not in allowed]
    if changed:
        lines = "; ".join(_difference(name, old.get(name), new[name]) for name in changed)
        raise ValueError(
            f"the run was begun with another configuration: {lines}. Take the old values or another "
            f"directory; or, if the checkpoint's arrays fit, go on with the new ones: "
            f"allow_changes={changed!r}"
        )


def check_changes(allowed: Any, record: RunRecord) -> tuple[str, ...]:
    """The names of what may differ from a run that is resumed.

    Raises:
      ValueError: they are no names, or not of what a configuration holds.
    """
    listed = sorted(allowed) if isinstance(allowed, set | frozenset) else allowed
    names = check_argument("allow_changes", listed, tuple[str, ...])
    if unknown := sorted(set(names) - set(record)):
        raise ValueError(f"allow_changes={unknown} must be among {', '.join(record)}")
    return names


def _difference(name: str, old: Any, new: Any) -> str:
    """Both values; of mappings the first entry that differs."""
    if isinstance(old, dict) or isinstance(new, dict):
        before, now = (value if isinstance(value, dict) else {} for value in (old, new))
        key = next(key for key in (*before, *now) if before.get(key) != now.get(key))
        return _difference(f"{name}[{key!r}]", before.get(key), now.get(key))
    return f"{name}={shown(old)} then, {shown(new)} now"


@jax.jit
def checksum(arrays: PyTree[Array]) -> Array:
    """The sum of the arrays' bits as whole numbers, modulo 2**32: the same on every mesh."""
    bits = lambda a: jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * min(a.dtype.itemsize, 4)}"))
    sums = (jnp.sum(bits(array).astype(jnp.uint32), dtype=jnp.uint32) for array in jax.tree.leaves(arrays))
    return sum(sums, start=jnp.uint32(0))


def _digest(setup: Setup, trained: PyTree[Array]) -> str:
    """SHA-256 of what the setup's transformation computes: the programs of its `init` and `update`.

    Transformations of optax are closures, without a name or options to ask for; but every number that they
    hold is in their programs. Other versions of JAX may write the same program in other words.
    """
    optimizer = optax.with_extra_args_support(setup.optimizer)
    params = jax.eval_shape(setup.masters, trained)
    total = lambda params: sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(params))
    update = lambda grad, state, params: optimizer.update(
        grad, state, params, value=jnp.float32(0), grad=grad, value_fn=total
    )
    state = jax.eval_shape(optimizer.init, params)
    programs = jax.make_jaxpr(optimizer.init)(params), jax.make_jaxpr(update)(params, state, params)
    digest = hashlib.sha256()
    for program in programs:
        digest.update(re.sub(" at 0x[0-9a-f]+", "", str(program.jaxpr)).encode())
        # Arrays that a program closes over are arguments in its text.
        for constant in program.consts:
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()
