"""Checkpoints of a run: parameters, optimiser state, step, key and the source's memory (Orbax)."""

from pathlib import Path
from types import TracebackType

import jax
import orbax.checkpoint as ocp

from dllm_jax.training.source import Memory
from dllm_jax.training.state import TrainState


class Checkpoints:
    """The checkpoints of one directory; a context manager.

    Orbax writes beside the target and renames, so a run killed at any moment leaves whole checkpoints only.
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
        """Writes the state under its step."""
        plain = state._replace(key=jax.random.key_data(state.key))
        args = ocp.args.Composite(state=ocp.args.StandardSave(plain), source=ocp.args.JsonSave(memory))
        self._manager.save(int(state.step), args=args)

    def latest(self, like: TrainState) -> tuple[TrainState, Memory] | None:
        """The newest checkpoint, or None if there is none.

        Args:
          like: a state of the same shapes, whose shardings are taken over.

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
