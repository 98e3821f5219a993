"""The pairs that a block's steps read: a compact store of chosen ones, and in its last slots the block's."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import key_mask
from dllm_jax.state.cache import KV, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows
from dllm_jax.state.selection import fraction_of


class BlockPairs(NamedTuple):
    """Storage of a layer.

    Attributes:
      dense: Pairs of all positions.
      chosen: Pairs of earlier blocks that the block's steps read, and in the last slots the block's own.
    """

    dense: KV
    chosen: KV


def chosen_count(keep: int | float, canvas: Canvas) -> Int[Array, "b"]:
    """Number of pairs that the block's steps read of earlier blocks."""
    stored = jnp.sum(canvas.before_model_block, axis=1)
    if isinstance(keep, int):
        return jnp.minimum(stored, keep)
    return fraction_of(stored, keep, canvas.layout.length)


def most(keep: int | float, stored: int) -> int:
    """The same of so many stored pairs."""
    return min(keep, stored) if isinstance(keep, int) else int(stored * keep)


def attend_to_chosen(
    keep: int | float,
    layer: Layer,
    q: Float[Array, "b q h d"],
    new: KV,
    cache: LayerCache,
    rows: Rows,
    canvas: Canvas,
) -> tuple[Float[Array, "b q h d"], LayerCache]:
    """Attention to the chosen pairs and to the block's own, which come first among the rows."""
    context = canvas.spec.context
    own = min(rows.index.shape[1], context.size)
    cache, both = cache.write_last(jax.tree.map(lambda a: a[:, :own], new), part="chosen")
    pairs, layout = both.chosen, canvas.layout
    slots = pairs.k.shape[1] - own

    # Without a mask where all slots are filled from the first block on.
    whole = layout.prompt // context.size * context.size
    least = 0 if layout.padded or context.from_response else whole
    if own == context.size and most(keep, least) == slots:
        mask = None
    else:
        filled = jnp.arange(slots) < chosen_count(keep, canvas)[:, None]
        mask = key_mask(jnp.concatenate([filled, rows.real[:, :own]], axis=1))
    o, _ = layer.attention(q, pairs.k, pairs.v, mask)
    return o, cache
