"""Votes for stored pairs by the positions of a block-causal model's block, in the steps that choose."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax import eviction
from dllm_jax.eviction.voters import voters_among
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.mask import SEGMENT, Mask
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import Rows, compact_rows, gather


def check_voters(votes: eviction.Voters, where: str):
    """Raises ValueError for voters of the prompt.

    Args:
      votes: Positions that vote.
      where: Words after "is not supported", which name the policy or option.
    """
    if votes.of_prompt:
        raise ValueError(
            f"votes={votes!r} is not supported {where}: steps of later blocks compute no prompt position. "
            "Use MaskVotes()."
        )


def rows_of_block(canvas: Canvas) -> Rows:
    """The positions of the model's block."""
    return compact_rows(canvas.in_model_block, canvas.spec.context.size)


def queries_of_block(
    layer: Layer,
    q: Float[Array, "b q h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h q"],
    rows: Rows,
    block: Rows,
    mask: Bool[Array, "#b #k #w s"],
) -> tuple[Float[Array, "b w h d"], Float[Array, "b h w"]]:
    """Takes the queries of the model's block, and their attention's log-sum-exp, out of a step's rows.

    Args:
      layer: this layer's weights.
      q: rotated queries of the rows.
      k: rotated keys.
      lse: log-sum-exp of the rows' attention.
      rows: Positions of the step.
      block: Positions of the block (`rows_of_block`).
      mask: Keys that the block attends to.
    """
    place = rows.slot(block.index)
    queries = gather(q, place)
    if rows.full and q.shape[1] > SEGMENT:
        # cuDNN returns no log-sum-exp: XLA would compute the scores of the whole prompt again.
        return queries, layer.attention(queries, k, k, mask)[1]
    return queries, jnp.swapaxes(gather(jnp.swapaxes(lse, 1, 2), place), 1, 2)


def mean_attention(
    votes: eviction.Voters,
    layer: Layer,
    q: Float[Array, "b w h d"],
    k: Float[Array, "b s k d"],
    lse: Float[Array, "b h w"],
    mask: Mask,
    rows: Rows,
    canvas: Canvas,
) -> Float[Array, "b k s"]:
    """Attention that each key receives, averaged over the voters and a KV head's query heads.

    Args:
      votes: Positions of the block that vote.
      layer: this layer's weights.
      q: rotated queries of the rows.
      k: rotated keys.
      lse: log-sum-exp of the queries' attention.
      mask: Keys that the queries attend to.
      rows: Positions of the block.
      canvas: State before the step.
    """
    voters = voters_among(votes, canvas, canvas.in_model_block)
    among = (rows.take(voters) & rows.real).astype(jnp.float32)
    weight = among / jnp.maximum(jnp.sum(voters, axis=1, keepdims=True), 1)
    return layer.received(q, k, lse, weight, mask) * (k.shape[2] / q.shape[2])
