"""One layer over the computed rows, or over all positions from its stored inputs."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.nn.layer import Block
from dllm_jax.policies.parts.control import when
from dllm_jax.state.cache import KV, LayerView
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows


class Stored(NamedTuple):
    """Storage from which a layer can be recomputed: its input and its K/V, for all positions."""

    x: Float[Array, "*n b l m"]
    kv: KV


class Passed(NamedTuple):
    """The result of a layer.

    Attributes:
      x: the residual stream at the rows.
      q: their queries.
      lse: log sum exp of their attention scores.
      stored: the storage of all layers.
    """

    x: Float[Array, "b q m"]
    q: Float[Array, "b q h d"]
    lse: Float[Array, "b h q"]
    stored: Stored


def pass_layer(
    block: Block,
    x: Float[Array, "b q m"],
    view: LayerView,
    rows: Rows,
    wide: Bool[Array, "b"],
    canvas: Canvas,
) -> Passed:
    """One layer: sequences that are `wide` compute all positions, the others only the rows.

    The rows' fresh inputs are stored first; a wide sequence recomputes everything from the stored inputs and
    stores its outputs as the next layer's inputs. If any sequence is wide, all are computed in full, but the
    others keep only the results that they would have computed alone.
    """
    queried = rows.mask(canvas.layout.length)
    position = jnp.broadcast_to(canvas.position, queried.shape)
    only = lambda chosen: Rows(jnp.where(chosen, position, canvas.layout.length), whole=False)
    inputs = LayerView(view.stack.x, view.layer)
    inputs, _ = inputs.update(rows._replace(whole=False), x)
    heads = (*x.shape[:2], block.spec.heads)
    begun = Passed(
        x, jnp.zeros((*heads, block.spec.head), x.dtype), jnp.zeros((heads[0], heads[2], heads[1])),
        Stored(inputs.stack, view.stack.kv),
    )  # fmt: skip

    def narrow(c: Passed) -> Passed:
        x, q, lse, kv = _compute(block, c.x, LayerView(c.stored.kv, view.layer), rows, rows, canvas)
        return Passed(x, q, lse, Stored(c.stored.x, kv))

    def widened(c: Passed) -> Passed:
        everywhere = Rows(position, whole=True)
        now = LayerView(c.stored.x, view.layer).read()
        kept = only(queried | wide[:, None])
        x, q, lse, kv = _compute(block, now, LayerView(c.stored.kv, view.layer), everywhere, kept, canvas)
        following = LayerView(c.stored.x, view.layer + 1)  # writes beyond the last layer are dropped
        stack = following.update(only(canvas.everything & wide[:, None]), x)[0].stack
        at_rows = jnp.moveaxis(rows.take(jnp.moveaxis(lse, 2, 1)), 1, 2)
        return Passed(rows.take(x), rows.take(q), at_rows, Stored(stack, kv))

    if rows.whole:
        return widened(begun)
    any_wide = jnp.any(wide)
    return when(any_wide, widened, when(~any_wide, narrow, begun))


def _compute(
    block: Block, x: Float[Array, "b q m"], kv: LayerView, rows: Rows, kept: Rows, canvas: Canvas
) -> tuple[Float[Array, "b q m"], Float[Array, "b q h d"], Float[Array, "b h q"], KV]:
    """The layer at the rows; of their K/V only those of `kept` (a subset, in the same slots) are stored."""
    q, k = block.qk(x, rows)
    kv, now = kv.update(kept, KV(k, block.value(x)))
    o, lse = block.attention(q, now.k, now.v, canvas.attends(rows))
    return block.finish(x, o), q, lse, kv.stack
