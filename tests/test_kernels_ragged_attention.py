"""`ragged_attention`: every implementation against softmax by numpy, and what it leaves unread."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.operands import _ragged
from pallas_kernels.ragged_attention import OPERATION, ragged_attention, xla
from pallas_kernels.ragged_attention.shapes import SMALL

from .kernel_cases import in_both_dtypes, interpreted

IMPLEMENTATIONS = {
    "xla": xla.ragged_attention,
    **interpreted(OPERATION),
}
each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def explicit(q, k, v, kept_k, kept_v, start, length, mask, readable) -> np.ndarray:
    """Softmax attention of every head to its dense pairs and its run, in float64."""
    q, k, v, kept_k, kept_v = (np.asarray(x, np.float64) for x in (q, k, v, kept_k, kept_v))
    groups, out = q.shape[2] // k.shape[2], np.zeros(q.shape)
    for b, i, h in np.ndindex(*q.shape[:3]):
        run = np.arange(start[b, h // groups], start[b, h // groups] + length[b, h // groups])
        run = run if readable is None else run[np.asarray(readable[b])[run]]
        seen = np.ones(k.shape[1], bool) if mask is None else np.asarray(mask[b, 0, 0])
        keys = np.concatenate([k[b, seen, h // groups], kept_k[b, run]])
        values = np.concatenate([v[b, seen, h // groups], kept_v[b, run]])
        score = keys @ q[b, i, h] * q.shape[3] ** -0.5
        weight = np.exp(score - score.max())
        out[b, i, h] = weight @ values / weight.sum()
    return out


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL, 3))
@each_implementation
def test_attention_to_runs_of_unequal_lengths(name, shape, dtype):
    case = _ragged(shape, dtype)
    narrow = name == "mosaic_gpu" and dtype == jnp.float32
    if narrow or (name != "xla" and shape.head == 24):
        with pytest.raises(NotImplementedError, match="head width 24" if shape.head == 24 else "float32"):
            IMPLEMENTATIONS[name](*case.arrays, **case.options)
        return
    found = jax.jit(functools.partial(IMPLEMENTATIONS[name], **case.options))(*case.arrays)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(found, np.float64), explicit(*case.arrays), rtol=tolerance, atol=tolerance
    )


@each_implementation
def test_a_run_may_be_empty_or_hold_everything(name):
    """Also with several chunks, and with pairs that are not finite where nothing may be attended to."""
    dtype = jnp.bfloat16 if name == "mosaic_gpu" else jnp.float32
    case = _ragged(SMALL[0]._replace(masked=False), dtype)
    q, k, v, kept_k, kept_v, *_ = case.arrays
    start, length = jnp.asarray([[0, 0], [0, 60]], jnp.int32), jnp.asarray([[0, 80], [60, 0]], jnp.int32)
    kept_k = kept_k.at[1, 60:].set(jnp.nan)
    arrays = q, k, v, kept_k, kept_v.at[1, 60:].set(jnp.inf), start, length, None, None
    found = jax.jit(functools.partial(IMPLEMENTATIONS[name], chunk=16, widest=80))(*arrays)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(found, np.float64), explicit(*arrays), rtol=tolerance, atol=tolerance
    )


def test_shapes_that_do_not_fit_raise():
    case = _ragged(SMALL[0], jnp.float32)
    q, k, v, kept_k, kept_v, start, length, mask, readable = case.arrays
    for wrong, message in (
        ((q, k, v, kept_k[:, :5], kept_v, start, length, mask, readable), "do not go with keys"),
        ((q, k, v, kept_k, kept_v, start[:, :1], length, mask, readable), "runs"),
        ((q, k, v, kept_k, kept_v, start, length, mask, readable[:, :3]), "readable"),
    ):
        with pytest.raises(ValueError, match=message):
            ragged_attention(*wrong, **case.options)
    with pytest.raises(ValueError, match="chunk=9 must be from 1 to widest=8"):
        ragged_attention(*case.arrays, chunk=9, widest=8)
