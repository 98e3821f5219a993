"""The settings that bench/policies.py compares: every policy over a small range of what it is tuned by."""

import dataclasses

from dllm_jax import policies as p
from dllm_jax import samplers as s


@dataclasses.dataclass(frozen=True)
class Setting:
    """A policy with a sampler.

    Attributes:
      policy: what is recomputed.
      sampler: what is decoded.
      divide_steps: fixed schedules take length / divide_steps steps ("half steps", "few steps").
    """

    policy: p.Policy = p.Policy()  # noqa: RUF009 (frozen)
    sampler: s.Sampler = s.Confidence()  # noqa: RUF009 (frozen)
    divide_steps: int = 1

    def options(self, length: int) -> dict[str, int]:
        """What to change in the options of `generate`."""
        return {"steps": max(length // self.divide_steps, 1)} if self.divide_steps > 1 else {}
