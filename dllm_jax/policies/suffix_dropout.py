"""Suffix dropout: distant masks after the block leave the network and attention (DPad, arXiv:2508.14148).

Masks far after the block are alike and many; a few of them serve the block as well. DPad draws them for each
block, Streaming-dLLM (arXiv:2601.17917) keeps the next and the last ones: two sets under one policy.
"""

import abc
import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from dllm_jax.nn.intervention import Intervention
from dllm_jax.nn.keys import seeded
from dllm_jax.nn.mask import require_full_attention
from dllm_jax.nn.model import Model
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import (
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    TracedNonNegativeInt,
)
from dllm_jax.policies.base import Policy, begun
from dllm_jax.policies.fast_dllm import DualCache
from dllm_jax.state.cache import Cache, Proposal
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import Rows
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


@dataclasses.dataclass(frozen=True)
class SuffixDropout(Policy):
    """Drops distant masks after the block from computation and attention, under another policy (DPad).

    Use it for long responses whose end is far from the current block.

    The set of retained masks is fixed from the first step of a block to its last. Given text after the block
    is always retained, and all tokens keep their positions.

    Memory: Dense keys and values for all positions.

    Limits: Needs a policy that consists of sets (`Policy.only_sets`), an integer block, and a model that
    attends in both directions.

    Equals exact decoding when: keep=NearAndLast(near >= response) and the other policy does. It then equals
      that policy, if that recomputes the block and all after it when a block begins.
    Differences: Draws depend on a seed and are alike in all sequences; the reference draws from torch's
      global generator, for one sequence. Its early end is `generate(..., stop_at_eos=True)`, which need not
      wait for the end of the block.

    Attributes:
      policy: Policy that selects the tokens to recompute among the retained ones, such as `DualCache`,
        `DKVDecode` or your own. Policies with layers of their own raise `ValueError`.
      keep: Masks after the block to retain: `GaussianDropout`, `UniformDropout` or `NearAndLast`.
    """

    policy: Policy = DualCache()
    keep: SuffixSet = GaussianDropout()

    def __post_init__(self):
        super().__post_init__()
        if not self.policy.only_sets:
            raise ValueError(
                f"policy={self.policy!r} is not supported by SuffixDropout: it has its own layer, which "
                "decides what to cache and attend to. Use a policy of sets, such as DualCache()."
            )

    def exists(self, canvas: Canvas) -> Bool[Array, "b l"]:
        """All positions except the dropped masks after the block."""
        distance = canvas.position - canvas.block_end
        dropped = canvas.masked & (distance >= 0) & ~self.keep.kept(canvas, distance)
        return ~dropped

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Selects the policy's positions among the retained ones; in a block's first step new ones too."""
        selected = self.policy.select(cache, canvas) | (canvas.block_begins & canvas.suffix)
        return selected & self.exists(canvas)

    @override
    def reads(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Limits the policy's attention to the retained positions."""
        return self.policy.reads(cache, canvas) & self.exists(canvas)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """Returns the policy's widths, a block's, and those at a quarter, a half, .. of the response."""
        retained = self.keep.size(layout) + int(spec.shifted)
        reached = (layout.prompt + -(-layout.response * quarter // 4) + retained for quarter in (1, 2, 3, 4))
        of_policy = self.policy.widths(spec, layout) if self.policy.reuses else ()
        return tuple(sorted({*of_policy, layout.block + retained, *reached}))

    # -- the policy's own, which finds in the cache what it has put there ----------------------------------

    @override
    def init(self, spec: ModelSpec, layout: Layout, batch: int, dtype: Any) -> Cache:
        require_full_attention(
            spec,
            "SuffixDropout",
            "drops masks after the block, which are not attended to there",
            "Use Policy()",
        )
        if layout.sliding is not None:
            raise ValueError(
                f"block={layout.sliding!r} is not supported by SuffixDropout: it keeps a set of masks "
                "for each block. Use an integer block."
            )
        under = self.policy.init(spec, layout, batch, dtype)
        return under._replace(layers=super().init(spec, layout, batch, dtype).layers)

    @override
    def before_first_step(
        self,
        cache: Cache,
        canvas: Canvas,
        model: Model,
        x: Float[Array, "b l m"],
        interventions: tuple[Intervention, ...] = (),
    ) -> Cache:
        return begun(self.policy, cache, canvas, model, x, interventions)

    @override
    def before_layers(self, cache: Cache, canvas: Canvas, rows: Rows) -> Cache:
        return self.policy.before_layers(cache, canvas, rows)

    @override
    def observe(self, cache: Cache, canvas: Canvas, rows: Rows, proposal: Proposal) -> Cache:
        return self.policy.observe(cache, canvas, rows, proposal)

    @property
    @override
    def scored(self) -> Literal["block", "response"]:
        return self.policy.scored

    @override
    def eligible(self, canvas: Canvas) -> Bool[Array, "b l"]:
        return self.policy.eligible(canvas)
