"""The grid of generations that a bench covers."""

import dataclasses
from collections.abc import Iterator

import dllm_jax as dj
from bench.shared.models import policies_named


@dataclasses.dataclass(frozen=True)
class Grid:
    """Policies by prompt lengths by batches.

    Attributes:
      policies: class names, with their defaults; all if empty.
      prompts: prompt lengths.
      batches: sequences at a time.
      length: response positions.
      block: positions per block.
      steps: denoising steps, as many as positions if not given.
    """

    policies: tuple[str, ...] = ()
    prompts: tuple[int, ...] = (1024, 4096, 16384, 32768)
    batches: tuple[int, ...] = (1, 8, 32)
    length: int = 256
    block: int = 32
    steps: int | None = None

    def __post_init__(self):
        policies_named(self.policies)

    @property
    def chosen(self) -> list[dj.policies.Policy]:
        """The policies."""
        return policies_named(self.policies)

    @property
    def denoising_steps(self) -> int:
        """Steps of a fixed schedule."""
        return self.steps or self.length

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Every prompt length with every batch."""
        yield from ((prompt, batch) for prompt in self.prompts for batch in self.batches)

    def layout(self, prompt: int) -> dj.Layout:
        """The geometry of one prompt length."""
        return dj.Layout(prompt, self.length, self.block, self.denoising_steps)
