"""`sparse_gather`: every implementation against indexing by numpy; all comparisons are of bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_gather import OPERATION, sparse_gather, xla
from pallas_kernels.sparse_gather.shapes import MODELS, SMALL, Shape

from . import ahead_of_time
from .kernel_cases import explaining, in_both_dtypes, interpreted

explain = explaining(OPERATION)
KERNELS = OPERATION.kernels
IMPLEMENTATIONS = {
    "xla": xla.sparse_gather,
    **interpreted(OPERATION),
}
each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def operands(shape: Shape, dtype=jnp.float32):
    """Keys and values of random bits (NaN, infinities and -0 among them); lists of all lengths."""
    rng = np.random.default_rng(shape.slots)
    size = shape.batch, shape.slots, shape.kv_heads, shape.head
    bits = np.uint32 if dtype == jnp.float32 else np.uint16
    k, v = (rng.integers(0, np.iinfo(bits).max, size, bits) for _ in range(2))
    sign, exponent, quiet = (2**31, 0x7F800000, 2**22) if dtype == jnp.float32 else (2**15, 0x7F80, 2**6)
    for x in (k, v):
        x[(x & (sign - 1)) > exponent] = exponent | quiet  # XLA may change which NaN it is
        if (
            dtype == jnp.bfloat16
        ):  # interpreted on CPUs, jax 0.12 makes 0 of numbers too small for an exponent
            x[(x & exponent) == 0] &= sign
    k, v = (x.view(dtype) for x in (k, v))
    k[:, 0, :, :3] = np.asarray([np.nan, -np.inf, -0.0], dtype)
    most = min(shape.width, shape.slots)
    index = np.full((shape.batch, shape.kv_heads, shape.width), shape.slots, np.int32)
    for n, (b, h) in enumerate(np.ndindex(*index.shape[:2])):
        count = (most, 0)[n] if n < 2 else rng.integers(0, most + 1)
        index[b, h, :count] = np.sort(rng.choice(shape.slots, count, replace=False))
    return jnp.asarray(k), jnp.asarray(v), jnp.asarray(index)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint32 if x.dtype == jnp.float32 else np.uint16)


def explicit(x, index) -> np.ndarray:
    """Bits of the copies, one by one."""
    x, index = bits(x), np.asarray(index)
    copies = np.zeros((x.shape[0], index.shape[2], *x.shape[2:]), x.dtype)
    for b, h, w in np.argwhere(index < x.shape[1]):
        copies[b, w, h] = x[b, index[b, h, w], h]
    return copies


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL, 2))
@each_implementation
def test_copies_bit_by_bit(name, shape, dtype):
    k, v, index = operands(shape, dtype)
    if name in ("triton", "mosaic_gpu") and shape.head == 24:
        with pytest.raises(NotImplementedError, match="head width 24"):
            IMPLEMENTATIONS[name](k, v, index)
        return
    found = jax.jit(IMPLEMENTATIONS[name])(k, v, index)
    for copies, x in zip(found, (k, v), strict=True):
        assert copies.dtype == dtype
        np.testing.assert_array_equal(bits(copies), explicit(x, index))


def test_order_and_repetition_are_free():
    k, v, _ = operands(SMALL[0])
    index = jnp.asarray([18, 19, 0, 0, 19, 5, 3], jnp.int32) + jnp.zeros((2, 3, 1), jnp.int32)
    for name, of in IMPLEMENTATIONS.items():
        np.testing.assert_array_equal(bits(jax.jit(of)(k, v, index)[1]), explicit(v, index), err_msg=name)


@each_implementation
def test_one_list_serves_all_heads(name):
    k, v, index = operands(SMALL[1], jnp.bfloat16)
    shared = index[:, :1]
    for copies, x in zip(jax.jit(IMPLEMENTATIONS[name])(k, v, shared), (k, v), strict=True):
        expected = explicit(x, jnp.broadcast_to(shared, index.shape))
        np.testing.assert_array_equal(bits(copies), expected)


def test_calls_that_a_kernel_does_not_serve_are_named():
    long = abstract(Shape(1, 16385, 1, 64, 8), jnp.float32)
    assert explain(*long)["tpu"] == "xla: 16385 slots, 8 copies: at most 16384 of float32"
    assert "no power of two" in explain(*abstract(SMALL[-1], jnp.float32))["cuda"]
    assert "not measured" in explain(*abstract(SMALL[0], jnp.float32))["tpu"]
    half = OPERATION.explain(tuple(abstract(SMALL[0], jnp.float16)), {}, "pallas")
    assert set(half.values()) == {"xla: float16: float32 or bfloat16"}


def test_shapes_that_do_not_go_together(unannotated):
    k, v, index = operands(SMALL[0])
    with pytest.raises(ValueError, match="must be alike"):
        sparse_gather(k, v[:, 1:], index)
    with pytest.raises(ValueError, match=r"index \(2, 2, 7\) must begin with \(2, 3\) or \(2, 1\)"):
        sparse_gather(k, v, index[:, 1:])
    with pytest.raises(ValueError, match="no slots"):
        sparse_gather(k[:, :0], v[:, :0], index)


def abstract(shape: Shape, dtype) -> list[jax.ShapeDtypeStruct]:
    k = jax.ShapeDtypeStruct((shape.batch, shape.slots, shape.kv_heads, shape.head), dtype)
    return [k, k, jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, shape.width), jnp.int32)]


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*SMALL[:2], *MODELS.values(), *SMALL[2:]], 6))
def test_compiles_for_tpu_v5e_if_libtpu_is_installed(shape, dtype, optimized):
    def by_heads(k, v, index):
        """Pairs that lie in memory as the kernel wants them, and as it leaves them."""
        copies = KERNELS["tpu"](jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), index)
        return [jnp.swapaxes(x, 1, 2) for x in copies]

    heads_first = jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, shape.slots, shape.head), dtype)
    index = abstract(shape, dtype)[2]
    program = ahead_of_time.compiled_for_v5e(by_heads, heads_first, heads_first, index)
    assert "tpu_custom_call" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 2**20 + 2 * index.size * 4  # no copy of the cache


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*MODELS.values(), *SMALL[:5]], 4))
def test_lowers_for_cuda(shape, dtype):
    with ahead_of_time.h100():
        lowered = (
            jax.jit(KERNELS["triton"]).trace(*abstract(shape, dtype)).lower(lowering_platforms=("cuda",))
        )
    assert "triton" in lowered.as_text()
