"""What a run writes to its directory, and reads when it resumes: checkpoints (Orbax), a log (JSON lines)."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array, PyTree

from dllm_jax.training.record import Record
from dllm_jax.training.source import Memory
from dllm_jax.training.state import TrainState

LogEntry = dict[str, Any]
STATE, SOURCE, CONFIGURATION = "state", "source", "configuration"


class Saved(NamedTuple):
    """What a checkpoint holds of a `TrainState`: all but what is frozen, the key as its numbers."""

    params: PyTree[Array]
    moments: PyTree[Array]
    step: PyTree[Array]
    key: PyTree[Array]


class Checkpoints:
    """The checkpoints of one directory.

    Each holds trained parameters, optimiser's state, step, key, the source's memory and the configuration. A
    context manager. Orbax writes beside the target and renames, so a run killed at any moment leaves
    complete checkpoints only. With several processes all call every method, and each writes and reads what
    its devices hold.
    """

    def __init__(self, directory: Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        handlers = {
            STATE: ocp.StandardCheckpointHandler(),
            SOURCE: ocp.JsonCheckpointHandler(),
            CONFIGURATION: ocp.JsonCheckpointHandler(),
        }
        self._directory = directory.absolute()
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ):
        self._manager.close()

    @property
    def step(self) -> int | None:
        """Optimiser steps done in the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, memory: Memory, record: Record):
        """Writes a checkpoint of the state's step, and removes all but the newest `keep`."""
        args = {
            STATE: ocp.args.StandardSave(_saved(state)),
            SOURCE: ocp.args.JsonSave(memory),
            CONFIGURATION: ocp.args.JsonSave(record),
        }
        self._manager.save(int(state.step), args=ocp.args.Composite(**args))

    def record(self) -> Record | None:
        """The newest checkpoint's configuration; None if it was written before there was one."""
        if not (self._directory / str(self.step) / CONFIGURATION).exists():
            return None
        args = ocp.args.Composite(**{CONFIGURATION: ocp.args.JsonRestore()})
        return self._manager.restore(self.step, args=args)[CONFIGURATION]

    def latest(self, like: TrainState) -> tuple[TrainState, Memory]:
        """Restores the newest checkpoint.

        Args:
          like: a state of the same shapes, which may be abstract, whose shardings the restored one gets: on
            any mesh, whatever mesh the checkpoint was written from.

        Raises:
          ValueError: the checkpoint holds other arrays (another model, optimizer or trainable).
        """
        # Names, shapes and dtypes are compared first: Orbax would cast and broadcast in silence.
        abstract = _abstract(like)
        self._check(abstract)
        args = {STATE: ocp.args.StandardRestore(abstract), SOURCE: ocp.args.JsonRestore()}
        restored = self._manager.restore(self.step, args=ocp.args.Composite(**args))
        saved = Saved(*restored[STATE])
        key = jax.random.wrap_key_data(saved.key)
        return TrainState(saved.params, saved.moments, saved.step, key, like.frozen), restored[SOURCE]

    def _check(self, abstract: Saved):
        """Refuses arrays of other names, shapes or dtypes, which Orbax would cast."""
        assert self.step is not None, "called where there is a checkpoint"
        found = self._manager.item_metadata(self.step)[STATE]
        old, new = _arrays(found), _arrays(abstract)
        for name in new | old:
            if old.get(name) != new.get(name):
                raise ValueError(
                    f"{self._directory} holds another model, optimizer or trainable: {name} is "
                    f"{old.get(name, 'absent')} there, {new.get(name, 'absent')} here"
                    + (MASTERS if _only_wider(old.get(name), new.get(name)) else "")
                )


MASTERS = "; TrainConfig(master_weights=False) goes on with a run that has no float32 master weights"


def _only_wider(old: str | None, new: str | None) -> bool:
    return old is not None and new is not None and old.partition("[")[2] == new.partition("[")[2]


def _arrays(tree: Any) -> dict[str, str]:
    """Arrays by path, in words: `float32[2, 3]`."""
    words = lambda leaf: f"{jax.numpy.dtype(leaf.dtype)}{list(leaf.shape)}"
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): words(leaf) for path, leaf in leaves}


def _saved(state: TrainState) -> Saved:
    return Saved(state.params, state.moments, state.step, jax.random.key_data(state.key))


def _abstract(like: TrainState) -> Saved:
    """What a checkpoint of such a state holds, where it is to lie."""
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    key = jax.eval_shape(jax.random.key_data, like.key)
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=like.step.sharding)
    params, moments, step = jax.tree.map(shape, (like.params, like.moments, like.step))
    return Saved(params, moments, step, key)


def read_log(file: Path) -> list[LogEntry]:
    """The entries of a log, oldest first; none if there is no file.

    Each line is one JSON object, so that a kill damages at most the last line, which is left out.

    Raises:
      ValueError: another line is no entry, with file and line.
    """
    if not file.exists():
        return []
    entries = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        # A line without an end is the one that a kill tore.
        if not line.endswith(b"\n"):
            break
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}:{number}: not an entry of a log: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ValueError(f"{file}:{number}: not an entry of a log: it names no step")
        entries.append(entry)
    return entries


def rewind_log(file: Path, step: int) -> list[LogEntry]:
    """Removes the entries after a step, which a resumed run will write again; returns the others.

    With several processes the first one writes, at once by a rename, while the others read: a run killed
    here leaves the old log or the new one, whole and on the disk.
    """
    entries = [entry for entry in read_log(file) if entry["step"] <= step]
    if jax.process_index() == 0:
        # Written beside and renamed: a kill leaves the old log or the new one, never half of it.
        rewound = file.with_name(f"{file.name}.rewound")
        with rewound.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(entry) + "\n" for entry in entries)
            _sync(out)
        rewound.replace(file)
    return entries


def append_to_log(file: Path, entry: LogEntry):
    """Adds an entry at the end of a log; it is on the disk before a checkpoint of its step is."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(entry) + "\n")
        _sync(out)


def _sync(file: IO[str]):
    """Waits until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())
