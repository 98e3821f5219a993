"""What a run writes to its directory, and reads when it resumes: checkpoints (Orbax), a log (JSON lines)."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from dllm_jax.training.source import Memory
from dllm_jax.training.state import TrainState

LogEntry = dict[str, Any]


class Checkpoints:
    """The checkpoints of one directory: parameters, optimiser state, step, key and the source's memory.

    A context manager. Orbax writes beside the target and renames, so a run killed at any moment leaves
    complete checkpoints only.
    """

    def __init__(self, directory: Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ):
        self._manager.close()

    def save(self, state: TrainState, memory: Memory):
        """Writes a checkpoint of the state's step, and removes all but the newest `keep`."""
        plain = state._replace(key=jax.random.key_data(state.key))
        args = ocp.args.Composite(state=ocp.args.StandardSave(plain), source=ocp.args.JsonSave(memory))
        self._manager.save(int(state.step), args=args)

    def latest(self, like: TrainState) -> tuple[TrainState, Memory] | None:
        """Restores the newest checkpoint; returns None if there is none.

        Args:
          like: a state of the same shapes, whose shardings the restored one gets.

        Raises:
          ValueError: the checkpoint holds other shapes (another model or optimiser).
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        plain = like._replace(key=jax.random.key_data(like.key))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, plain)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), source=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        state = TrainState(*restored["state"])
        return state._replace(key=jax.random.wrap_key_data(state.key)), restored["source"]


def read_log(file: Path) -> list[LogEntry]:
    """The entries of a log, oldest first; none if there is no file.

    Each line is one JSON object, so that a kill damages at most the last line, which is left out.
    """
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rewind_log(file: Path, step: int) -> list[LogEntry]:
    """Removes the entries after a step, which a resumed run will write again; returns the others."""
    entries = [entry for entry in read_log(file) if entry["step"] <= step]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return entries


def append_to_log(file: Path, entry: LogEntry):
    """Adds an entry at the end of a log."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(entry) + "\n")
