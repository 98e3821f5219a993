"""Sets of masks after the block to retain: random ones (DPad) and fixed ones (Streaming-dLLM)."""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.keys import seeded
from dllm_jax.options import (
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    TracedNonNegativeInt,
)
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.selection import best


@dataclasses.dataclass(frozen=True)
class SuffixSet(Options, abc.ABC):
    """A set of positions after each sequence's block; the same in all steps of the block."""

    @abc.abstractmethod
    def kept(self, canvas: Canvas, distance: Int[Array, "b l"]) -> Bool[Array, "b l"]:
        """The positions that stay, among those of distance 0 and more.

        Args:
          canvas: state before the step.
          distance: Distance from the first position after the block, which has 0.
        """

    @abc.abstractmethod
    def size(self, layout: Layout) -> int:
        """How many positions stay at most, or, of draws, seldom more: a matter of speed."""


@dataclasses.dataclass(frozen=True)
class Drawn(SuffixSet, abc.ABC):
    """Base of sets that are drawn for each block, from the seed, the block's number and the distance.

    Draws do not depend on the prompt, on padding or on other sequences, which draw alike.

    Attributes:
      window: positions after the block to draw from; those further away are left out.
      seed: Random seed for dropping suffix tokens. Default: 0.
    """

    window: PositiveInt = 256
    seed: TracedNonNegativeInt = dataclasses.field(default=0, kw_only=True)

    def draws(self, canvas: Canvas, distance: Int[Array, "b l"]) -> Float[Array, "b l"]:
        """Uniform [0, 1) draws of the block, at these distances; anything at negative ones."""
        layout, key = canvas.layout, seeded(self.seed)
        number = (canvas.block_start - canvas.first_block) // layout.block
        of_block = lambda n: jax.random.uniform(jax.random.fold_in(key, n), (layout.response,))
        draws = jax.vmap(of_block)(number)
        return jnp.take_along_axis(draws, jnp.clip(distance, 0, layout.response - 1), axis=1)


@dataclasses.dataclass(frozen=True)
class GaussianDropout(Drawn):
    """Keeps a position with a probability that falls with its distance as a Gaussian does (DPad).

    The probability is scale * N(x; 0, 1), x going from 0 at the block to sigma at the end of the window;
    where that exceeds 1, the position stays always.

    Attributes:
      sigma: standard deviations that the window spans.
      scale: multiplies the density, 0.4 next to the block. The reference implementation's is 2, others by
        task.
    """

    sigma: NonNegativeFloat = 4.0
    scale: PositiveFloat = 2.0

    def probabilities(self, response: int) -> Float[np.ndarray, "response"]:
        """With which a position stays, by distance; float32."""
        x = np.linspace(0.0, self.sigma, self.window)
        density = self.scale * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        padded = np.pad(density[:response], (0, max(response - self.window, 0)))
        return np.minimum(padded, 1.0).astype(np.float32)

    @override
    def kept(self, canvas: Canvas, distance: Int[Array, "b l"]) -> Bool[Array, "b l"]:
        chance = jnp.asarray(self.probabilities(canvas.layout.response))
        return self.draws(canvas, distance) < chance[jnp.clip(distance, 0, len(chance) - 1)]

    @override
    def size(self, layout: Layout) -> int:
        """The expected number and three standard deviations."""
        p = self.probabilities(layout.response).astype(np.float64)
        return math.ceil(p.sum() + 3 * math.sqrt((p * (1 - p)).sum()))


@dataclasses.dataclass(frozen=True)
class UniformDropout(Drawn):
    """Keeps `number` positions of the window, all of them equally likely (DPad's ablation).

    Attributes:
      number: positions that stay.
    """

    number: PositiveInt = 32

    @override
    def kept(self, canvas: Canvas, distance: Int[Array, "b l"]) -> Bool[Array, "b l"]:
        inside = (distance >= 0) & (distance < self.window)
        draw = jnp.where(inside, self.draws(canvas, distance), -jnp.inf)
        return best(draw, self.number)

    @override
    def size(self, layout: Layout) -> int:
        return min(self.number, self.window)


@dataclasses.dataclass(frozen=True)
class NearAndLast(SuffixSet):
    """Keeps the positions next to the block and the last of the response, which say how long it is.

    Streaming-dLLM (arXiv:2601.17917) keeps a window of blocks and the very last position.

    Attributes:
      near: positions next to the block.
      last: positions at the end of the response.
    """

    near: NonNegativeInt = 32
    last: NonNegativeInt = 1

    @override
    def kept(self, canvas: Canvas, distance: Int[Array, "b l"]) -> Bool[Array, "b l"]:
        return (distance < self.near) | (canvas.position >= canvas.layout.end - self.last)

    @override
    def size(self, layout: Layout) -> int:
        return self.near + self.last
