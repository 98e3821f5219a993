"""Norm, rotary embedding and matmul precision against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import Precision

from dllm_jax.nn import arithmetic, rope
from dllm_jax.nn.arithmetic import einsum, precision

rms_norm = jax.jit(arithmetic.rms_norm, static_argnums=2)
rope_table = jax.jit(rope.rope_table, static_argnums=(0, 1, 2))
rotate = jax.jit(rope.rotate, static_argnums=3)

RNG = np.random.default_rng(0)
BF16 = jnp.bfloat16


def rotated(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Every pair (j, j + d/2) as a complex number, turned by position * base^(-2j/d)."""
    half = x.shape[-1] // 2
    angle = positions[..., None] * base ** (-2 * np.arange(half) / x.shape[-1])
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def heads(batch: int = 2, rows: int = 5, count: int = 3, width: int = 16) -> np.ndarray:
    return RNG.standard_normal((batch, rows, count, width)).astype(np.float32)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1.0])
def test_rms_norm(eps):
    x, scale = RNG.standard_normal((2, 3, 32)), RNG.standard_normal(32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale
    ours = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), eps)
    np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=2e-6)
    assert (rms_norm(jnp.zeros((1, 4)), jnp.ones(4), eps) == 0).all()
    large = rms_norm(jnp.full((1, 4), 1e4, BF16), jnp.ones(4, BF16), 1e-6)  # the square needs float32
    np.testing.assert_array_equal(large, jnp.ones((1, 4), BF16))


def test_rms_norm_rounds_before_it_scales():
    x = jnp.asarray(RNG.standard_normal((64, 32)), BF16)
    scale = jnp.asarray(1 + RNG.standard_normal(32), BF16)
    wide = np.asarray(x, np.float32)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    in_order = jnp.asarray(normed).astype(BF16) * scale
    scaled_first = jnp.asarray(normed * np.asarray(scale, np.float32)).astype(BF16)
    ours = rms_norm(x, scale, 1e-5)
    assert ours.dtype == BF16
    assert (ours == in_order).mean() > 0.999  # the statistics may differ by one float32 rounding
    assert (ours == scaled_first).mean() < 0.9


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6 * 14])
def test_rope_turns_pairs_by_their_position(base):
    x = heads()
    index = np.asarray([[0, 1, 7, 250, 511], [3, 3, 4, 5, 6]])
    ours = rotate(jnp.asarray(x), rope_table(512, 16, base), jnp.asarray(index, jnp.int32), True)
    np.testing.assert_allclose(ours, rotated(x.astype(np.float64), index, base), atol=1e-4)


def test_rope_in_float32_or_in_the_activation_dtype():
    x = jnp.asarray(heads(4, 64), BF16)
    rope, index = rope_table(64, 16, 1e4), jnp.tile(jnp.arange(64, dtype=jnp.int32), (4, 1))
    exact = rotated(np.asarray(x, np.float64), np.asarray(index), 1e4)
    error = lambda y: np.abs(np.asarray(y, np.float64) - exact)
    wide, narrow = rotate(x, rope, index, True), rotate(x, rope, index, False)
    assert wide.dtype == narrow.dtype == BF16
    assert (wide == jnp.asarray(exact.astype(np.float32)).astype(BF16)).mean() > 0.999  # rounded once
    assert error(wide).mean() < 0.7 * error(narrow).mean()
    np.testing.assert_allclose(np.asarray(narrow, np.float32), exact, atol=0.05)


def test_float32_matmuls_are_exact_and_narrow_ones_fast():
    def precisions(dtype):
        x = jax.ShapeDtypeStruct((2, 3), dtype)
        jaxpr = jax.make_jaxpr(lambda x, y: einsum("ij,kj->ik", x, y))(x, x)
        (dot,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
        return dot.params["precision"], dot.outvars[0].aval.dtype

    assert precisions(jnp.float32) == ((Precision.HIGHEST, Precision.HIGHEST), jnp.float32)
    assert precisions(BF16)[1] == BF16
    assert precision(jnp.dtype(BF16)) == Precision.DEFAULT
    x = jnp.full((1, 4), 1 / 3, BF16)
    assert einsum("bi,bi->b", x, x, out=jnp.float32).dtype == jnp.float32


def test_a_matrix_of_several_summed_axes_is_not_turned_around():
    o, matrix = jnp.ones((1, 4, 6, 8)), jnp.ones((6, 8, 16))
    product = jax.jit(lambda x, y: einsum("bqhd,hdm->bqm", x, y))
    assert " transpose(" not in product.lower(o, matrix).compile().as_text()
