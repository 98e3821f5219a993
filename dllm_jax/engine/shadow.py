"""WINO's shadow block: the current block a second time, masked, beside the canvas that a step computes.

Nothing on the canvas sees the shadow. A shadow position attends to the whole shadow block and to what is read
of the canvas except the position that it stands for, so that its output predicts that position's token
without seeing it. A step carries the shadow's residual stream after that of its rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.eviction.attending import merge_by_lse
from dllm_jax.nn.layer import Layer, embed
from dllm_jax.nn.model import Model
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.state.cache import KV, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows

Both = tuple[Float[Array, "b q m"], Float[Array, "b s m"]]  # residual streams of the rows and of the shadow


def check_policy(sampler: Sampler, policy: Policy):
    """Raises ValueError if the sampler verifies tokens and the policy has a layer of its own.

    A shadow position attends to the keys and values that the step itself attends to, which must be those of
    all positions, where the default layer leaves them.
    """
    if sampler.verifies and not policy.only_sets:
        raise ValueError(
            f"{type(sampler).__name__} is not supported by {type(policy).__name__}: it verifies tokens "
            "against the KV pairs of all positions. Use Policy(), PrefixCache(), DualCache(), DKVDecode() or "
            "DKVPD()."
        )


def decoded_in_block(canvas: Canvas) -> Bool[Array, "b l"]:
    """Tokens that earlier steps decoded in the current block, in active sequences."""
    return canvas.block & (canvas.decoded_at >= 0) & ~canvas.masked & canvas.active[:, None]


def place_in_shadow(canvas: Canvas, index: Int[Array, "b c"]) -> Int[Array, "b c"]:
    """The place of canvas positions in the shadow block; those outside of the block get that of another."""
    return jnp.clip(index - canvas.block_start[:, None], 0, canvas.layout.block - 1)


def masked_block(model: Model, canvas: Canvas) -> Float[Array, "b s m"]:
    """The embedded inputs of the shadow block."""
    return embed(model.params, jnp.full_like(_positions(canvas), canvas.spec.mask_id))


def over_both(layer: Callable[..., tuple[Array, LayerCache]]) -> Callable[..., tuple[Both, LayerCache]]:
    """A policy's layer, over its rows and over the shadow block."""

    def both(
        weights: Layer, streams: Both, cache: LayerCache, rows: Rows, canvas: Canvas
    ) -> tuple[Both, LayerCache]:
        x, shadow = streams
        stored = _not_stored(weights, x, rows, cache)
        after, cache = layer(weights, x, cache, rows, canvas)
        now = cache.read() if stored is None else stored

        # Keys and values of the canvas, as the step has left them, without that of the position itself.
        position = _positions(canvas)
        read = canvas.valid if cache.readable is None else cache.readable
        others = read[:, None, None, :] & (position[:, None, :, None] != canvas.position)
        q, k = weights.qk(shadow, position)
        of_canvas = weights.attention(q, now.k, now.v, others)

        # And those of the shadow itself; the two disjoint sets are merged by their log-sum-exp.
        of_shadow = weights.attention(q, k, weights.value(shadow))
        o, _ = merge_by_lse(of_canvas, of_shadow)
        return (after, weights.finish(shadow, o.astype(q.dtype))), cache

    return both


def _positions(canvas: Canvas) -> Int[Array, "b s"]:
    """The positions of the current block."""
    # Behind the last block, where no sequence is active any more, positions would leave the canvas.
    position = canvas.block_start[:, None] + jnp.arange(canvas.layout.block, dtype=jnp.int32)
    return jnp.minimum(position, canvas.layout.length - 1)


def _not_stored(layer: Layer, x: Float[Array, "b q m"], rows: Rows, cache: LayerCache) -> KV | None:
    """The layer's keys and values where the policy stores none, as the exact decoder: those of the canvas."""
    if jax.tree.leaves(cache.storage.layers):
        return None
    assert rows.full, "what stores nothing computes everything"
    return KV(layer.qk(x, rows.index)[1], layer.value(x))
