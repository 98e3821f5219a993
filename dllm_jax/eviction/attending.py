"""Attention to the prompt: to the kept pairs, or to all of it where it is recomputed.

Kept pairs are read in chunks of slots per head. Heads keep different numbers of pairs; unpacked to one static
width, all heads would be as wide as the widest one may be, which is the whole prompt if one head can win a
layer's budget. With chunks, the actually widest head decides at run time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.eviction.pair_store import PairStore
from dllm_jax.nn.layer import Layer
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, scatter

LEAST = 128  # slots of a chunk: fewer would not fill the hardware


def attend_to_kept(
    layer: Layer,
    q: Float[Array, "b q h d"],
    kept: PairStore,
    elsewhere: tuple[Float[Array, "b q h d"], Float[Array, "b h q"]],
    budget: int,
    widest: int,
    least: int = LEAST,
) -> Float[Array, "b q h d"]:
    """Attention of the queries to a layer's kept pairs and to the pairs of `elsewhere`.

    Args:
      layer: the layer.
      q: queries.
      kept: the pairs.
      elsewhere: output and log-sum-exp of attention to other pairs.
      budget: pairs of a head on average, and the size of a chunk.
      widest: the most pairs that a head may have.
      least: the smallest chunk, unless no head may have as many pairs.
    """
    chunk, index = slots_of_chunk(budget, widest, least), layer.index
    longest = jnp.max(kept.length[index])

    def add(state):
        done, o, lse = state
        k, v, real = kept.read(index, chunk, done)
        part, part_lse = layer.attention(q, k, v, real)
        return done + chunk, *merge_by_lse((o, lse), (part.astype(jnp.float32), part_lse))

    o, lse = elsewhere
    start = jnp.int32(0), o.astype(jnp.float32), lse
    return jax.lax.while_loop(lambda state: state[0] < longest, add, start)[1].astype(q.dtype)


def slots_of_chunk(budget: int, widest: int, least: int = LEAST) -> int:
    """Slots of each head in a chunk; 1 where there is no prompt, so that `widest` is 0."""
    return max(min(max(budget, least), widest), 1)


def prompt_pairs(
    kept: PairStore,
    layer: Int[Array, ""],
    due: Bool[Array, "b 1"],
    keys: tuple[Rows, Float[Array, "b w k d"]],
    values: tuple[Rows, Float[Array, "b q k d"]],
    canvas: Canvas,
) -> tuple[Float[Array, "b p k d"], Float[Array, "b p k d"], Bool[Array, "b #k 1 p"]]:
    """Keys, values and which are real: the whole new prompt where it is due, else the kept pairs.

    Args:
      kept: the pairs.
      layer: index of the layer.
      due: sequences whose prompt is recomputed; all of it is among the new rows.
      keys: new rotated keys, and their positions.
      values: new values, and their positions.
      canvas: state before the step.
    """
    prompt = canvas.layout.prompt
    old_k, old_v, real = kept.read(layer, prompt)
    renewed = lambda old, rows, new: jnp.where(
        due[..., None, None], scatter(jnp.zeros_like(old), rows.index, new), old
    )
    real = jnp.where(due[..., None, None], canvas.prompt[:, None, None, :prompt], real)
    return renewed(old_k, *keys), renewed(old_v, *values), real


def merge_by_lse(
    one: tuple[Float[Array, "b q h d"], Float[Array, "b h q"]],
    other: tuple[Float[Array, "b q h d"], Float[Array, "b h q"]],
) -> tuple[Float[Array, "b q h d"], Float[Array, "b h q"]]:
    """Output and log-sum-exp of attention to both sets of pairs; 0 and -inf where both are empty."""
    lse = jnp.logaddexp(one[1], other[1])
    safe = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weight = lambda part: jnp.swapaxes(jnp.exp(part - safe), 1, 2)[..., None]
    return one[0] * weight(one[1]) + other[0] * weight(other[1]), lse
