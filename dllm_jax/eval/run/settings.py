"""How requests are decoded."""

import dataclasses
from typing import Any

from dllm_jax.policies import Policy
from dllm_jax.samplers import Confidence, Sampler
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Settings of `generate`, and a seed.

    Attributes:
      length: response positions; None: each request has its own.
      block: positions decoded together; None: all. Shorter requests are one block.
      steps: denoising steps in total, at most one per position; None: one per position. A request of another
        length than `length` has as many steps per position; without `length`, every request has `steps`.
      policy: what is recomputed.
      sampler: what is decoded when.
      stop_at_eos: rows finish at their first end-of-text; their answers do not change.
      seed: with the request, it determines the request's draws; batch and order do not matter.
    """

    length: int | None = None
    block: int | None = None
    steps: int | None = None
    policy: Policy = Policy()
    sampler: Sampler = Confidence()
    stop_at_eos: bool = True
    seed: int = 0

    def __post_init__(self):
        if self.length is not None:
            Layout.of(1, self.length, self.block, self.steps)
            if self.steps is not None and self.steps > self.length:
                raise ValueError(
                    f"steps={self.steps} must be at most length={self.length}: a step decodes a token or more"
                )
        for name in ("block", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    def at(self, length: int) -> "Decoding":
        """These settings for a request's length: a block no longer than the answer; steps see above.

        Raises:
          ValueError: the length is not a multiple of the block, or the steps are more than the length, not
            whole, or not a multiple of the blocks.
        """
        if length == self.length:
            return self
        steps = self.steps
        if self.length is not None and steps is not None:
            steps = rescaled(steps, self.length, length)
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


def rescaled(steps: int, length: int, wanted: int) -> int:
    """Steps for `wanted` positions, as many per position as `steps` for `length`.

    Raises:
      ValueError: they are not whole.
    """
    if steps * wanted % length:
        raise ValueError(
            f"steps={steps} for length={length} are no whole number of steps for {wanted} positions: "
            f"{steps * wanted / length:g}"
        )
    return steps * wanted // length
