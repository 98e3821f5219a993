"""Fast-dLLM's block-wise approximate KV cache (arXiv:2505.22618, section 3.2)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool
from typing_extensions import override

from dllm_jax.nn.spec import ModelSpec
from dllm_jax.policies.base import Policy, halvings
from dllm_jax.state.cache import Cache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.layout import Layout


@dataclasses.dataclass(frozen=True)
class PrefixCache(Policy):
    """Keeps K/V of everything before the current block; the block and all that follows is recomputed.

    The first step of a block recomputes, and thereby refreshes, the whole canvas and decodes like any other.

    Exact limit: one step per block.
    Departures: batches and padding work (the reference has neither in this mode), and with Dream's shifted
    head the positions that predict the suffix are recomputed instead of committing each block's first token
    unconditionally (the rule of d2Cache's baseline).
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in a block's first step, then the positions that predict the block and all after it."""
        return canvas.block_begins | canvas.predicting_positions(canvas.suffix)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        """The response, a half and a quarter of it, from a block on: later blocks have a shorter suffix."""
        return tuple(w for w in halvings(layout.response)[-3:] if w >= layout.block)


@dataclasses.dataclass(frozen=True)
class DualCache(Policy):
    """Keeps K/V of everything outside the current block, the masked suffix included.

    The first step of a block recomputes the whole canvas, later steps only the positions that predict the
    block.

    Exact limit: one step per block.
    Departures: as for `PrefixCache`; the reference's dual cache crashes for batches.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything in a block's first step, then the positions that predict the block."""
        return canvas.block_begins | canvas.predicting_positions(canvas.block)

    @override
    def widths(self, spec: ModelSpec, layout: Layout) -> tuple[int, ...]:
        return halvings(layout.widest_block, smallest=layout.block)[:3]


@dataclasses.dataclass(frozen=True)
class SubBlockCache(DualCache):
    """Fast-dLLM v2's cache over sub-blocks (arXiv:2509.26328), renewed until a block's first token is there.

    A step computes everything that may change while the first position of the block is masked, later steps
    compute the block. On a block-causal model what may change is the model's block, of
    which `block=` is a part.

    Exact limit: one step per block.
    Departures: the released code keeps the cache of the model's block before, whose keys a block's first
    sub-block then reads; here it is renewed with each block.
    """

    @override
    def select(self, cache: Cache, canvas: Canvas) -> Bool[Array, "b l"]:
        """Everything while the block's first position is masked, then the block."""
        # Its first token is known by then: what would predict it, with a shifted head, is not needed.
        first = canvas.position == canvas.block_start[:, None]
        undecided = jnp.any(canvas.masked & first, axis=1, keepdims=True)
        return canvas.first_step | undecided | canvas.block
