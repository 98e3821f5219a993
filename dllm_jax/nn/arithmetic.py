"""The decoder's arithmetic as free functions: norm, projections, guidance, cosine."""

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int

from dllm_jax.nn.int8 import Int8Matrix
from dllm_jax.nn.low_rank import LowRankMatrix
from dllm_jax.traced import Number
from dllm_jax.xla.products import in_order_of_names


def precision(dtype: jnp.dtype) -> Precision:
    """Full precision for float32 (no TF32, no bf16 passes); the hardware's default for narrower types."""
    return Precision.HIGHEST if dtype == jnp.float32 else Precision.DEFAULT


def of_token(values: Float[Array, "*b v"], token: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """The value of the given token at each position, of logits or log-probabilities."""
    return jnp.take_along_axis(values, token[..., None], axis=-1)[..., 0]


def einsum(
    formula: str, x: Float[Array, "..."], y: Float[Array, "..."] | Int8Matrix | LowRankMatrix, out=None
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands at the `precision` of the first one's dtype; `out` widens the result.

    Of an int8 matrix, whose outputs must be in the result in its own order, the sums are scaled in float32. A
    low-rank update is added to the product with its matrix, in the wider of their dtypes.
    """
    if isinstance(y, LowRankMatrix):
        return _updated(formula, x, y, out)
    formula = in_order_of_names(formula)
    if isinstance(y, Int8Matrix):
        # The conversion is all that stands between the values and the product: compilers then fuse the two.
        sums = jnp.einsum(
            formula,
            x,
            y.values.astype(x.dtype),
            precision=precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        # Scales lie along the matrix's outputs: axes of x between these get one of length 1.
        operands, result = formula.split("->")
        outputs = [axis in operands.split(",")[1] for axis in result]
        between = [i for i in range(outputs.index(True), len(outputs)) if not outputs[i]]
        scale = jnp.expand_dims(y.scale, [i - len(outputs) for i in between]) if between else y.scale
        return (sums * scale).astype(out or x.dtype)
    return jnp.einsum(formula, x, y, precision=precision(x.dtype), preferred_element_type=out)


def _updated(formula: str, x: Float[Array, "..."], y: LowRankMatrix, out) -> Float[Array, "..."]:
    """The product with a matrix and its update, whose factors are multiplied one after the other."""
    operands, result = formula.split("->")
    inputs, matrix = operands.split(",")
    summed = "".join(axis for axis in matrix if axis not in result)
    outer = "".join(axis for axis in matrix if axis in result)
    narrow = f"{''.join(axis for axis in inputs if axis not in summed)}r"
    through = einsum(f"{inputs},{summed}r->{narrow}", x.astype(y.a.dtype), y.a)
    if y.where is not None:
        through = jnp.where(y.where.reshape(-1, *[1] * (through.ndim - 1)), through, 0)
    update = einsum(f"{narrow},r{outer}->{result}", through, y.b)
    product = einsum(formula, x, y.base, out)
    return (product + y.scale * update).astype(product.dtype)


def rms_norm(x: Float[Array, "*b m"], scale: Float[Array, "m"], eps: float) -> Float[Array, "*b m"]:
    """x / rms(x) in float32, cast back to x's dtype, then scaled in that dtype (Llama's order)."""
    # The reference multiplies by the scale after the cast: bf16 results depend on that order.
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale


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
