"""What the tasks share: the half an example belongs to is read off its prompt, so the halves cannot meet."""

import abc
import zlib

import numpy as np

from dllm_jax.tasks.base import Example, Split


class HeldOut(abc.ABC):
    """The part of a `Task` that holds prompts out, for frozen dataclasses with a field `hold_out`.

    Attributes:
      hold_out: one prompt in `hold_out` is held out; at least 2, to leave some to train on.
    """

    hold_out: int

    def __post_init__(self):
        if self.hold_out < 2:
            raise ValueError(f"hold_out={self.hold_out} must be at least 2")

    def example(self, rng: np.random.Generator, size: int, split: Split) -> Example:
        """Draws examples until one lies in the half that is wanted.

        Raises:
          ValueError: a size that the task does not have.
        """
        self._check_size(size)
        while True:
            example = self._draw(rng, size)
            if self.split_of(example) == split:
                return example

    def split_of(self, example: Example) -> Split:
        """Held out iff the prompt's checksum is a multiple of `hold_out`."""
        return "train" if zlib.crc32(example.prompt.encode()) % self.hold_out else "held_out"

    @abc.abstractmethod
    def _check_size(self, size: int): ...

    @abc.abstractmethod
    def _draw(self, rng: np.random.Generator, size: int) -> Example:
        """An example of either half."""
