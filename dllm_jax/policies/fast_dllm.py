"""Fast-dLLM's block-wise approximate KV cache (arXiv:2505.22618, section 3.2)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import BY_PARTS, Phase, Policy, halvings, with_mask_token
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class PrefixCache(Policy):
    """Caches everything before the current block; recomputes the block and all tokens after it (Fast-dLLM).

    Use it when responses are short or the model is sensitive to stale masks after the block. On long
    responses `DualCache` computes far fewer tokens.

    The first step of a block is a full step: it refreshes the canvas and unmasks tokens like any other step.

    Memory: Dense keys and values for all positions.

    Limits: A partial step grows with the number of tokens from the block to the end.

    Equals exact decoding when: every block takes one step.
    Differences: Batches and padding work; the reference ignores padding on LLaDA, and with a threshold never
      ends on batches of Dream. On Dream the positions that predict the suffix are recomputed, where the
      reference unmasks each block's first token unconditionally.
    """

    fixed_within_blocks: ClassVar[bool] = True

    @property
    @override
    def phases(self) -> tuple[Phase, ...]:
        return (Phase(at_end=True),)

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in a block's first step, then the positions that predict the block and all after it."""
        return canvas.block_begins | canvas.predicting_positions(canvas.suffix)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response, a half and a quarter of it, from a block on: later blocks have a shorter suffix.

        A shifted head takes one position more, since the last position predicts nothing and the step's are
        the last ones of the canvas.
        """
        return tuple(w + spec.shifted for w in halvings(layout.response)[-3:] if w >= layout.block)

    _in_blocks = with_mask_token(BY_PARTS)


@dataclasses.dataclass(frozen=True)
class DualCache(Policy):
    """Caches everything outside the current block, the masked suffix included (Fast-dLLM).

    Use it first: it has no options, and on the bundled models its accuracy is within a point of exact
    decoding's in blocks of 4 to 32. Combine it with `Threshold` for parallel decoding.

    The first step of a block is a full step. Later steps recompute only the positions that predict the block.

    Memory: Dense keys and values for all positions.

    Limits: Every block costs a full step, which dominates with long prompts or few steps per block.

    Equals exact decoding when: every block takes one step.
    Differences: As for `PrefixCache`. The reference's dual cache crashes on batches.
    """

    fixed_within_blocks: ClassVar[bool] = True

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in a block's first step, then the positions that predict the block."""
        return canvas.block_begins | canvas.predicting_positions(canvas.block)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        return halvings(layout.widest_block, smallest=layout.block)[:3]

    _in_blocks = with_mask_token(BY_PARTS)


@dataclasses.dataclass(frozen=True)
class SubBlockCache(DualCache):
    """Caches everything outside a sub-block, once the sub-block's first token is unmasked (Fast-dLLM v2).

    Use it on block-causal models with `block` smaller than the model's block. Paper: arXiv:2509.26328.

    While the first token of the sub-block is masked, a step recomputes everything that may change. On a
    block-causal model that is the model's block. Later steps recompute the sub-block.

    Equals exact decoding when: every block begins with a mask and takes one step.
    Differences: The cache is refreshed with each block. The reference keeps the cache of the previous block,
      whose keys the first sub-block then attends to.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in the first step and while the block's first position is masked, else the block."""
        # A sub-block whose first token is known begins without a full step, which `DualCache` promises.
        # Its first token is known by then: what would predict it, with a shifted head, is not needed.
        first = canvas.position == canvas.block_start[:, None]
        undecided = jnp.any(canvas.masked & first, axis=1, keepdims=True)
        return canvas.first_step | undecided | canvas.block
