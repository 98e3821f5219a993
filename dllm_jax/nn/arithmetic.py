"""The decoder's arithmetic as free functions: norm, rotary embedding, projections, guidance."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import Precision
from jaxtyping import Array, Float, Int

from dllm_jax.nn.int8 import Int8Matrix
from dllm_jax.nn.low_rank import LowRankMatrix
from dllm_jax.traced import Number


def precision(dtype: jnp.dtype) -> Precision:
    """Full precision for float32 (no TF32, no bf16 passes); the hardware's default for narrower types."""
    return Precision.HIGHEST if dtype == jnp.float32 else Precision.DEFAULT


def einsum(
    formula: str, x: Float[Array, "..."], y: Float[Array, "..."] | Int8Matrix | LowRankMatrix, out=None
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands at the `precision` of the first one's dtype; `out` widens the result.

    Of an int8 matrix, whose outputs must be the last axes of the result, the sums are scaled in float32. A
    low-rank update is added to the product with its matrix, in the wider of their dtypes.
    """
    if isinstance(y, LowRankMatrix):
        return _updated(formula, x, y, out)
    if isinstance(y, Int8Matrix):
        # The conversion is all that stands between the values and the product: compilers then fuse the two.
        sums = jnp.einsum(
            formula,
            x,
            y.values.astype(x.dtype),
            precision=precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return (sums * y.scale).astype(out or x.dtype)
    return jnp.einsum(formula, x, y, precision=precision(x.dtype), preferred_element_type=out)


def _updated(formula: str, x: Float[Array, "..."], y: LowRankMatrix, out) -> Float[Array, "..."]:
    """The product with a matrix and its update, whose factors are multiplied one after the other."""
    operands, result = formula.split("->")
    inputs, matrix = operands.split(",")
    summed = "".join(axis for axis in matrix if axis not in result)
    kept = "".join(axis for axis in matrix if axis in result)
    narrow = f"{''.join(axis for axis in inputs if axis not in summed)}r"
    through = einsum(f"{inputs},{summed}r->{narrow}", x.astype(y.a.dtype), y.a)
    update = einsum(f"{narrow},r{kept}->{result}", through, y.b)
    product = einsum(formula, x, y.base, out)
    return (product + y.scale * update).astype(product.dtype)


def rms_norm(x: Float[Array, "*b m"], scale: Float[Array, "m"], eps: float) -> Float[Array, "*b m"]:
    """x / rms(x) in float32, cast back to x's dtype, then scaled in that dtype (Llama's order)."""
    # The reference multiplies by the scale after the cast: bf16 results depend on that order.
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale


def divided(x: Float[Array, "..."], by: Number) -> Float[Array, "..."]:
    """x / by, as a product with the float32 reciprocal.

    XLA makes that of a division by a constant, but not always of one by a traced number: written out, both
    give the same bits.
    """
    return x * (1 / jnp.asarray(by, jnp.float32))


def guided(
    conditional: Float[Array, "*b v"], unconditional: Float[Array, "*b v"], scale: Number
) -> Float[Array, "*b v"]:
    """Logits under classifier-free guidance: unconditional + (scale + 1)(conditional - unconditional)."""
    return unconditional + (scale + 1) * (conditional - unconditional)


def cosine(x: Float[Array, "b q *d"], y: Float[Array, "b q *d"]) -> Float[Array, "b q"]:
    """Cosine similarity of each position's vectors, heads concatenated, float32 in [-1, 1].

    The offset keeps vectors of zeros, such as padding, from dividing by zero.
    """
    x, y = (a.reshape(*a.shape[:2], -1).astype(jnp.float32) for a in (x, y))
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return jnp.sum(x * y, axis=-1) / jnp.maximum(norms, 1e-8)


class Rope(NamedTuple):
    """Rotary tables of every canvas position: cos and sin, float32 [l+1, d/2]; the last entry is padding."""

    cos: Float[Array, "l half"]
    sin: Float[Array, "l half"]


def rope_table(positions: int, head: int, base: float) -> Rope:
    """Angles position * base^(-2j/d), computed in float32 as the references do."""
    # Frequencies by the host's float32 power, whose bits are those of the references. XLA's differ in the
    # last ones, which thousands of positions away is an angle off by 1e-4 (and LLaDA-V's logits by 1e-3).
    exponent = np.arange(0, head, 2, dtype=np.float32) / np.float32(head)
    frequency = np.float32(1) / np.float32(base) ** exponent
    angle = jnp.arange(positions + 1, dtype=jnp.float32)[:, None] * frequency
    return Rope(jnp.cos(angle), jnp.sin(angle))


def rotate(
    x: Float[Array, "b q h d"], rope: Rope, index: Int[Array, "b q"], in_f32: bool
) -> Float[Array, "b q h d"]:
    """Rotates the half-split pairs (j, j + d/2) of each head by the angle of its position.

    Args:
      x: queries or keys.
      rope: tables from `rope_table`.
      index: canvas position of each query or key.
      in_f32: rotate in float32 and cast back (LLaDA), or cast the tables to x's dtype first (Dream).
    """
    compute = jnp.dtype(jnp.float32) if in_f32 else x.dtype
    cos = rope.cos[index][:, :, None].astype(compute)
    sin = rope.sin[index][:, :, None].astype(compute)

    # Pairs are half a head apart (GPT-NeoX's order), as in the checkpoints of LLaDA and Dream.
    first, second = jnp.split(x.astype(compute), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
