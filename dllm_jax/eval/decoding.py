"""How requests are decoded."""

import dataclasses
from typing import Any

from dllm_jax.layout import Layout
from dllm_jax.policies import Policy
from dllm_jax.samplers import Confidence, Sampler


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of `generate`, and a seed.

    Attributes:
      length: response positions.
      block: positions decoded together; None: all.
      steps: denoising steps in total; None: one per token.
      policy: what is recomputed.
      sampler: what is decoded when.
      stop_at_eos: rows finish at their first end-of-text; their answers do not change.
      seed: with the request, it determines the request's draws; batch and order do not matter.
    """

    length: int = 128
    block: int | None = None
    steps: int | None = None
    policy: Policy = Policy()
    sampler: Sampler = Confidence()
    stop_at_eos: bool = True
    seed: int = 0

    def __post_init__(self):
        Layout(1, self.length, self.block or self.length, self.steps or self.length)
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    def at(self, length: int) -> "Decoding":
        """These settings for another length: equal tokens per step, a block no longer than the answer.

        Raises:
          ValueError: the length is not a multiple of the block, or the steps are not whole.
        """
        if length == self.length:
            return self
        steps = None if self.steps is None else max(1, self.steps * length // self.length)
        block = None if self.block is None else min(self.block, length)
        return dataclasses.replace(self, length=length, block=block, steps=steps)

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, except the key."""
        names = ("length", "block", "steps", "policy", "sampler", "stop_at_eos")
        return {name: getattr(self, name) for name in names}

    def described(self) -> dict[str, Any]:
        """JSON values for records; policy and sampler as constructor calls with every field."""
        return {
            name: repr(value) if dataclasses.is_dataclass(value) else value
            for name, value in ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        }
