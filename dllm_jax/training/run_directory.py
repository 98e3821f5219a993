"""What a run writes to its directory, and reads when it resumes: checkpoints (Orbax), a log (JSON lines)."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp

from dllm_jax.training.record import Record, check_unchanged
from dllm_jax.training.source import Memory
from dllm_jax.training.state import TrainState

LogEntry = dict[str, Any]
STATE, SOURCE, CONFIGURATION, LOG = "state", "source", "configuration", "log"


class RunDirectory:
    """The checkpoints of a run, and its log.

    A checkpoint holds trained parameters, optimiser's state, step, key, the source's memory, the
    configuration and the log so far; `log.jsonl` beside them is for people. A context manager. Orbax writes
    beside the target and renames, so a run killed at any moment leaves complete checkpoints only. With
    several processes all call every method, and each writes and reads what its devices hold.
    """

    def __init__(self, root: Path, record: Record, keep: int = 2):
        root.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        handlers = {name: ocp.JsonCheckpointHandler() for name in (SOURCE, CONFIGURATION, LOG)}
        handlers = {STATE: ocp.StandardCheckpointHandler(), **handlers}
        self._root, self._record = root, record
        folder = root.absolute() / "checkpoints"
        self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
        self._log = root / "log.jsonl"

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *error: object):
        self._manager.close()

    @property
    def step(self) -> int | None:
        """Optimiser steps done in the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, memory: Memory, log: list[LogEntry]):
        """Writes a checkpoint of the state's step, and removes all but the newest `keep`."""
        args = {
            STATE: ocp.args.StandardSave(_saved(state)),
            SOURCE: ocp.args.JsonSave(memory),
            CONFIGURATION: ocp.args.JsonSave(self._record),
            LOG: ocp.args.JsonSave({"entries": log}),
        }
        self._manager.save(int(state.step), args=ocp.args.Composite(**args))

    def resume(self, like: TrainState, allowed: Collection[str]) -> tuple[TrainState, Memory, list[LogEntry]]:
        """Restores the newest checkpoint: state, the source's memory, and the log up to its step.

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
        items = {name: ocp.args.JsonRestore() for name in (SOURCE, LOG)}
        restored = read(**{STATE: ocp.args.StandardRestore(wanted), **items})
        saved = restored[STATE]
        key = jax.random.wrap_key_data(saved["key"])
        state = TrainState(**(saved | {"key": key}), frozen=like.frozen)
        return state, restored[SOURCE], restored[LOG]["entries"]

    def write_log(self, entries: list[LogEntry], mode: Literal["w", "a"]):
        """Writes entries to `log.jsonl`, a line each: in place of what is there ("w"), or behind it ("a")."""
        if jax.process_index() == 0:
            with self._log.open(mode, encoding="utf-8") as out:
                out.writelines(json.dumps(entry) + "\n" for entry in entries)


def _saved(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds of a state: all but what is frozen, the key as its numbers."""
    held = state._replace(key=jax.random.key_data(state.key))._asdict()
    return {name: part for name, part in held.items() if name != "frozen"}


def _arrays(tree: Any) -> dict[str, str]:
    """Arrays by path, in words: `float32[2, 3]`."""
    words = lambda leaf: f"{jax.numpy.dtype(leaf.dtype)}{list(leaf.shape)}"
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): words(leaf) for path, leaf in leaves}
