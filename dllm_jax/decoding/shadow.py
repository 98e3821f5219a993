"""WINO's shadow block: the current block a second time, masked, beside the canvas that a step computes.

Nothing on the canvas sees the shadow. A shadow position attends to the whole shadow block and to the whole
canvas except the position that it stands for, so that its output predicts that position's token without
seeing it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.eviction.attending import merge_by_lse
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.model import Model
from dllm_jax.nn.rope import Rope
from dllm_jax.policies.base import Policy
from dllm_jax.samplers.base import Sampler
from dllm_jax.state.cache import KV, Cache, LayerCache
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows


class Shadow(NamedTuple):
    """The residual stream of the shadow block after the last layer.

    Attributes:
      hidden: of each position of the block, in order.
      block_start: first position of the block.
    """

    hidden: Float[Array, "b s m"]
    block_start: Int[Array, ""]

    def take(self, index: Int[Array, "b c"]) -> Float[Array, "b c m"]:
        """The stream at canvas positions of the block; what others read must not be used."""
        slot = jnp.clip(index - self.block_start, 0, self.hidden.shape[1] - 1)
        return jnp.take_along_axis(self.hidden, slot[..., None], axis=1)


def to_verify(canvas: Canvas) -> Bool[Array, "b l"]:
    """Tokens that earlier steps decoded in the current block, in active sequences."""
    return canvas.block & (canvas.decoded_at >= 0) & ~canvas.masked & canvas.active[:, None]


def check_policy(sampler: Sampler, policy: Policy):
    """Raises ValueError if the sampler verifies tokens and the policy's layers are not the default ones.

    A shadow position attends to the keys and values that the step itself attends to, which must be those of
    all positions, where the default layer leaves them.
    """
    if sampler.verifies and type(policy).layer is not Policy.layer:
        raise ValueError(
            f"{type(sampler).__name__} verifies tokens against the keys and values of all positions, which "
            f"{type(policy).__name__} does not keep where the default layer does: use Policy, PrefixCache, "
            "DualCache, DKVDecode or DKVPD"
        )


def network_with_shadow(
    model: Model,
    rope: Rope,
    policy: Policy,
    tokens: Int[Array, "b l"],
    canvas: Canvas,
    rows: Rows,
    cache: Cache,
    embeds: Float[Array, "b l m"] | None = None,
) -> tuple[Float[Array, "b q m"], Cache, Shadow]:
    """As `step.network`, and the shadow block beside it; arguments are its.

    Returns:
      the residual stream at the rows after the last layer, the changed cache, and the shadow.
    """
    batch, width = tokens.shape[0], canvas.layout.block
    position = jnp.broadcast_to(canvas.block_start + jnp.arange(width), (batch, width)).astype(jnp.int32)

    # Behind the last block, where no sequence is active any more, positions would leave the canvas.
    position = jnp.minimum(position, canvas.layout.length - 1)
    counterpart = position[:, None, :, None] == canvas.position
    mask = canvas.valid[:, None, None, :] & ~counterpart

    def run(layer: Layer, carry):
        (x, shadow), cache = carry
        view = LayerCache.of(cache, layer.index, model.kernels)
        now = _stored(layer, x, rows, view)
        after, view = policy.layer(layer, x, view, rows, canvas)
        now = view.read() if now is None else now

        q, k = layer.qk(shadow, position)
        of_canvas = layer.attention(q, now.k, now.v, mask)
        of_shadow = layer.attention(q, k, layer.value(shadow))
        o, _ = merge_by_lse(of_canvas, of_shadow)
        return (after, layer.finish(shadow, o.astype(q.dtype))), view.into(cache, layer.index)

    masks = jnp.full_like(position, canvas.spec.mask_id)
    x = embed(model.params, rows.take(tokens), None if embeds is None else rows.take(embeds))
    carry = (x, embed(model.params, masks)), cache
    carry = walk(model.params, model.spec, rope, run, carry, model.kernels, where_used=True)
    (x, shadow), cache = carry
    return x, cache, Shadow(shadow, canvas.block_start)


def _stored(layer: Layer, x: Float[Array, "b q m"], rows: Rows, view: LayerCache) -> KV | None:
    """The layer's keys and values where the policy stores none, as the exact decoder: those of the canvas."""
    if jax.tree.leaves(view.layers):
        return None
    assert rows.full, "what stores nothing computes everything"
    return KV(layer.qk(x, rows.index)[1], layer.value(x))
