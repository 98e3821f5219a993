"""`received` and `head_mean`: every implementation against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.nn import attention
from pallas_kernels.received_attention import HEAD_MEAN, RECEIVED, head_mean, received, reference, xla
from pallas_kernels.received_attention.shapes import MODELS, SMALL, Shape

from . import ahead_of_time
from .kernel_cases import explaining, in_both_dtypes, some
from .test_kernels_row_attention import abstract as abstract_rows
from .test_kernels_row_attention import explicit as attended
from .test_kernels_row_attention import operands as row_operands
from .test_kernels_row_attention import visible

OPERATIONS = {"received": RECEIVED, "head_mean": HEAD_MEAN}
IMPLEMENTATIONS = {
    "reference": vars(reference),
    "xla": vars(xla),
    "xla in tiles of 40": {of: functools.partial(getattr(xla, of), tile=40) for of in OPERATIONS},
    **{
        platform: {
            of: functools.partial(op.kernels[platform], interpret=True) for of, op in OPERATIONS.items()
        }
        for platform in ("tpu", "cuda")
    },
}
each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
# float32 scores up to about 15, off by 1e-6 of that, in an exponent; sums of up to 1050 weights of at most 1.
TOLERANCE = dict(rtol=5e-5, atol=1e-6)


def operands(shape: Shape, dtype=jnp.float32) -> tuple:
    """Queries, keys, lse, weights (0 for the first row, and for the last, which is NaN), mask and lengths."""
    q, k, v, mask, lengths = row_operands(shape, dtype)
    lse = jnp.asarray(attended(shape, q, k, v, mask, lengths)[1], jnp.float32)
    weight = np.random.default_rng(shape.slots).random((shape.batch, shape.rows)).astype(np.float32)
    if shape.rows > 1:
        weight[:, 0], weight[:, -1] = 0, 0
        q, lse = q.at[:, 0].set(jnp.nan), lse.at[:, :, 0].set(jnp.nan)
    return q, k, lse, jnp.asarray(weight), mask, lengths


def explicit(shape: Shape, q, k, lse, weight, mask, lengths):
    """Both results, one head at a time, by float64 numpy."""
    q, k, lse, weight = (np.asarray(x, np.float64) for x in (q, k, lse, weight))
    seen = visible(shape, *(None if x is None else np.asarray(x) for x in (mask, lengths)))
    given = np.zeros((shape.batch, shape.kv_heads, shape.slots))
    mean = np.zeros((shape.batch, shape.rows, shape.slots))
    for b, h in np.ndindex(shape.batch, shape.heads):
        group = h * shape.kv_heads // shape.heads
        some = seen[b, group]
        if some.any():
            p = np.exp(q[b, :, h] @ k[b, some, group].T / np.sqrt(shape.head) - lse[b, h][:, None])
            mean[b][:, some] += p / shape.heads
            given[b, group, some] += weight[b][weight[b] != 0] @ p[weight[b] != 0]
    return given, mean


def check(shape: Shape, arrays, given, mean):
    wanted = explicit(shape, *arrays)
    assert (given.dtype, mean.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(given, wanted[0], **TOLERANCE)
    rows = slice(1, -1) if shape.rows > 1 else slice(None)
    np.testing.assert_allclose(mean[:, rows], wanted[1][:, rows], **TOLERANCE)


def both(of, q, k, lse, weight, mask, lengths):
    """Both results at once, of one set of functions."""
    return of["received"](q, k, lse, weight, mask, lengths), of["head_mean"](q, k, lse, mask, lengths)


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL, 4))
@each_implementation
def test_equals_float64(name, shape, dtype):
    arrays = operands(shape, dtype)
    run = functools.partial(both, IMPLEMENTATIONS[name])
    if name == "cuda" and shape.head == 24:
        with pytest.raises(NotImplementedError, match="head width 24"):
            run(*arrays)
        return
    check(shape, arrays, *jax.jit(run)(*arrays))


def test_is_what_attention_gives():
    q, k, lse, weight, mask, lengths = operands(SMALL[0])
    seen = jnp.asarray(visible(SMALL[0], np.asarray(mask), np.asarray(lengths)))[:, :, None]
    check(
        SMALL[0],
        (q, k, lse, weight, mask, lengths),
        jax.jit(attention.received)(q, k, lse, weight, seen),
        jax.jit(attention.head_mean)(q, k, lse, seen),
    )


@pytest.mark.parametrize("implementation", some(["pallas", None, "xla"], 1))
def test_every_choice_gives_the_same(implementation):
    of = {
        name: functools.partial(function, implementation=implementation)
        for name, function in (("received", received), ("head_mean", head_mean))
    }
    arrays = operands(SMALL[1])
    check(SMALL[1], arrays, *jax.jit(functools.partial(both, of))(*arrays))


def test_what_a_kernel_does_not_serve_is_said():
    for name, explain in (("received", explaining(RECEIVED)), ("head_mean", explaining(HEAD_MEAN))):
        arrays = abstract(name, SMALL[-1], jnp.float32)
        assert "head width 24" in explain(*arrays)["cuda"]
        assert "not measured" in explain(*arrays)["tpu"]
        half = abstract(name, SMALL[0], jnp.float16)
        assert explain(*half)["tpu"] == "xla: q float16, k float16: all float32 or all bfloat16"


def test_shapes_that_do_not_go_together(unannotated):
    q, k, lse, weight, mask, lengths = operands(SMALL[0])
    with pytest.raises(ValueError, match=r"queries \(2, 5, 7, 64\) do not go with keys"):
        received(q[:, :, :7], k, lse, weight)
    with pytest.raises(ValueError, match=r"mask \(2, 149\) must be"):
        head_mean(q, k, lse, mask[:, 1:], lengths)


def abstract(of: str, shape: Shape, dtype) -> list:
    q, k, _, *seen = abstract_rows(shape, dtype)
    lse = jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.rows), jnp.float32)
    weight = jax.ShapeDtypeStruct((shape.batch, shape.rows), jnp.float32)
    return [q, k, lse, *([weight] if of == "received" else []), *seen]


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*reversed(MODELS.values()), *SMALL], 4))
@pytest.mark.parametrize("of", OPERATIONS)
def test_compiles_for_tpu_v5e_if_libtpu_is_installed(of, shape, dtype, optimised):
    def by_heads(q, k, *rest):
        """Keys that lie in memory as the kernel wants them."""
        return OPERATIONS[of].kernels["tpu"](q, jnp.swapaxes(k, 1, 2), *rest)

    q, _, *rest = abstract(of, shape, dtype)
    heads_first = jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, shape.slots, shape.head), dtype)
    program = ahead_of_time.compiled_for_v5e(by_heads, q, heads_first, *rest)
    assert "tpu_custom_call" in program.as_text()
    # no weights: queries by kv head, and columns of rows, which take 512 bytes each
    rows = shape.batch * shape.rows * shape.heads
    assert (
        program.memory_analysis().temp_size_in_bytes
        < rows * (2 * shape.head * q.dtype.itemsize + 1024) + 2**20
    )


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*MODELS.values(), *SMALL[:6]], 4))
@pytest.mark.parametrize("of", OPERATIONS)
def test_lowers_for_cuda(of, shape, dtype):
    with ahead_of_time.h100():
        traced = jax.jit(OPERATIONS[of].kernels["cuda"]).trace(*abstract(of, shape, dtype))
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
