"""Attention rollout over one step's computed positions, and the nucleus that carries most of its influence.

Rollout (Abnar & Zuidema 2020; arXiv:2509.23094, section 4.2) multiplies the layers' head-averaged attention:
C = W_n ... W_1, W = (E + I) / row sums, E being the identity with the computed rows replaced by their
attention. A row that was not computed is an identity row in every W and so in C: only the q computed rows
of C are kept, [b q l] for the duration of a step, and a layer costs q^2 l multiplications.

The column sums alone could be had from the last layer down, one vector-matrix product per layer, but
only after all n maps [b n q l] have been stored: a factor n in memory (2 GiB in the first step of a
32-layer model at 4096 positions, as much as its K/V cache, against 64 MiB here) to save 6 % of the
arithmetic of that one step and 0.1 % of any other.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from dllm_jax.nn.arithmetic import einsum
from dllm_jax.state.rows import Rows
from dllm_jax.traced import Number, fixed_at
from dllm_jax.xla.products import few_rows_at_once_on_tpu


def identity_rows(rows: Rows) -> Float[Array, "b q l"]:
    """C before the first layer: the identity's rows at the computed positions, zero at padding."""
    return (rows.index[..., None] == jnp.arange(rows.length)).astype(jnp.float32)


def roll(
    c: Float[Array, "b q l"], attention: Float[Array, "b q l"], rows: Rows, valid: Bool[Array, "b l"]
) -> Float[Array, "b q l"]:
    """The computed rows of W C, for one layer's head-averaged attention.

    A row that attends to nothing stays unchanged; so does any row at padding.

    Args:
      c: computed rows of C, before this layer.
      attention: attention weights of the computed positions, averaged over query heads.
      rows: the computed positions.
      valid: positions that are not padding.
    """
    # Rows of E that were computed are attention, all others identity: E C = attention (C with the rows of
    # positions that were not computed replaced by the identity's).
    attention = jnp.where((rows.real & rows.take(valid))[..., None], attention, 0.0)

    # Rows of C that were not computed are the identity's: there the product is the attention itself. Only the
    # q computed columns need a multiplication.
    to_identity = jnp.where(rows.mask()[:, None], 0.0, attention)
    # Rows of padding read the attention of some position, but their C is zero.
    to_computed = jnp.swapaxes(rows.take(jnp.swapaxes(attention, 1, 2)), 1, 2)
    times = lambda attention, c: einsum("bqr,brl->bql", attention, c)
    product = to_identity + few_rows_at_once_on_tpu(times, to_computed, c)

    # W = (E + I) / row sums: the residual connection passes C on unchanged.
    return (product + c) / (jnp.sum(attention, axis=2, keepdims=True) + 1.0)


def column_sums(c: Float[Array, "b q l"], rows: Rows, valid: Bool[Array, "b l"]) -> Float[Array, "b l"]:
    """How much every position influences all of them: the column sums of C, padding left out.

    The sums of a row add up to the number of valid positions. A position that was not computed adds 1 to its
    own sum, so the recomputed set rotates.
    """
    # The identity rows of positions that were not computed are never stored: they add 1 on the diagonal.
    from_rows = jnp.sum(jnp.where(rows.take(valid)[..., None], c, 0.0), axis=1)
    return jnp.where(valid, from_rows + ~rows.mask(), 0.0)


def nucleus(weight: Float[Array, "b l"], among: Bool[Array, "b l"], p: Number) -> Bool[Array, "b l"]:
    """The heaviest positions whose summed weight stays within p of the total, and always the heaviest one.

    The paper takes the smallest set whose mass exceeds p, one position more. Ties go to the lower index; p =
    1 is all of them.

    Args:
      weight: influence of each position, not negative.
      among: positions to choose from.
      p: fraction of their total weight.
    """
    # Sums of fractions may end below 1: the exact limit must not depend on rounding.
    if fixed_at(p, 1):
        return among

    # Descending, those outside of `among` last.
    weight = jnp.where(among, weight, 0.0)
    order = jnp.argsort(-jnp.where(among, weight, -1.0), axis=1, stable=True)
    probability = jnp.take_along_axis(weight, order, axis=1) / (jnp.sum(weight, axis=1, keepdims=True) + 1e-9)

    # Inclusive: a position belongs to the nucleus if its own mass still fits.
    in_nucleus = (jnp.cumsum(probability, axis=1) <= p) | (jnp.arange(weight.shape[1]) == 0)
    sequence = jnp.arange(weight.shape[0])[:, None]
    return jnp.zeros_like(among).at[sequence, order].set(in_nucleus) & among
