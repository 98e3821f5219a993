"""`attention`, `received` and `head_mean`: every implementation against float64 numpy.

`tests/test_attention.py` tests XLA's form on its own: masks that differ by query, chunks of queries,
gradients.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import (
    ATTENTION,
    HEAD_MEAN,
    RECEIVED,
    attention,
    head_mean,
    received,
    tpu,
    triton,
)
from pallas_kernels.attention.shapes import ENTERING, MODELS, SMALL, Shape

from . import ahead_of_time
from .kernel_cases import explaining, in_both_dtypes, interpreted, some

SHARED = [shape for shape in MODELS.values() if shape not in ENTERING.values()]  # of all operations
OPERATIONS = {"attention": ATTENTION, "received": RECEIVED, "head_mean": HEAD_MEAN}
explain = explaining(ATTENTION)
KERNELS = lambda kind: {name: interpreted(of)[kind] for name, of in OPERATIONS.items()}
IMPLEMENTATIONS = {
    "tpu": KERNELS("tpu"), "triton": KERNELS("triton"),
    "xla": {name: of.xla for name, of in OPERATIONS.items()},
    "xla in chunks of 4": {name: functools.partial(of.xla, chunk=4) for name, of in OPERATIONS.items()},
}  # fmt: skip
# float32 sums of up to 700 terms, scores up to about 15, off by 1e-6 of that, in an exponent; bfloat16
# operands have exact float32 products. In bfloat16 weights and results are rounded to 8 bits: off by 1/128 at
# most.
TOLERANCE = dict(rtol=5e-5, atol=1e-5)
ROUNDED = dict(rtol=1 / 128, atol=1 / 128)


class Operands(NamedTuple):
    """Arrays of all three operations; None where there is no mask or no lengths."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    lse: jax.Array
    weight: jax.Array
    mask: jax.Array | None
    lengths: jax.Array | None


def operands(shape: Shape, dtype=jnp.float32) -> Operands:
    """Random operands; what may hold anything holds NaN.

    The first kv head has length 0, the last one is full, and the second half of the first mask is False, as
    are the first three quarters of the last one. The first and the last of several queries are NaN, as is the
    first one's log-sum-exp, and have weight 0; so are the invisible slots.
    """
    rng = np.random.default_rng(shape.slots)
    batch, slots, kv_heads = shape.batch, shape.slots, shape.kv_heads
    q = rng.standard_normal((batch, shape.queries, shape.heads, shape.head)) * 3
    k, v = rng.standard_normal((2, batch, slots, kv_heads, shape.head))
    weight = rng.random((batch, shape.queries))
    mask = lengths = None
    if shape.visible in ("lengths", "both"):
        lengths = rng.integers(0, slots + 1, (batch, kv_heads), dtype=np.int32)
        lengths.flat[0], lengths.flat[-1] = 0, slots
    if shape.visible in ("keys", "keys per head", "both"):
        mask = rng.random((batch, kv_heads if shape.visible == "keys per head" else 1, 1, slots)) < 0.6
        mask[0, 0, 0, slots // 2 :] = False
        mask[-1, -1, 0, : slots * 3 // 4] = False
    hidden = ~np.moveaxis(visible(shape, mask, lengths), 1, 2)
    k[hidden], v[hidden] = np.nan, np.nan
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))  # rounded before the log-sum-exp is taken
    lse = explicit(shape, q, k, v, weight, mask, lengths)[1]
    if shape.queries > 1:
        q[:, 0], q[:, -1], lse[:, :, 0] = np.nan, np.nan, np.nan
        weight[:, 0], weight[:, -1] = 0, 0
    if shape.queries > 2:
        lse[:, 0, 1] = -np.inf  # a query that saw nothing sends nothing, though it may see something now
    lse, weight = lse.astype(np.float32), weight.astype(np.float32)
    return Operands(*(None if x is None else jnp.asarray(x) for x in (q, k, v, lse, weight, mask, lengths)))


def visible(shape: Shape, mask, lengths) -> np.ndarray:
    """Bool[b k s]."""
    seen = np.ones((shape.batch, shape.kv_heads, shape.slots), bool)
    if mask is not None:
        seen &= np.asarray(mask)[:, :, 0]
    if lengths is not None:
        seen &= np.arange(shape.slots) < np.asarray(lengths)[..., None]
    return seen


def explicit(shape: Shape, q, k, v, weight, mask, lengths, idle=False):
    """Attention, log-sum-exp, received and head mean, one head at a time, by float64 numpy.

    Queries that are `idle` [b h q] send nothing, and have no weights in the mean.
    """
    idle = np.broadcast_to(idle, (shape.batch, shape.heads, shape.queries))
    q, k, v, weight = (np.asarray(x, np.float64) for x in (q, k, v, weight))
    seen = visible(shape, mask, lengths)
    out, lse = np.zeros(q.shape), np.full((shape.batch, shape.heads, shape.queries), -np.inf)
    given = np.zeros((shape.batch, shape.kv_heads, shape.slots))
    mean = np.zeros((shape.batch, shape.queries, shape.slots))
    for b, h in np.ndindex(shape.batch, shape.heads):
        group = h * shape.kv_heads // shape.heads
        some = seen[b, group]
        if some.any():
            scores = q[b, :, h] @ k[b, some, group].T / np.sqrt(shape.head)
            top = scores.max(axis=-1)
            lse[b, h] = top + np.log(np.exp(scores - top[:, None]).sum(axis=-1))
            p = np.exp(scores - lse[b, h][:, None])
            out[b, :, h] = p @ v[b, some, group]
            p[idle[b, h]] = 0
            given[b, group, some] += weight[b][weight[b] != 0] @ p[weight[b] != 0]
            mean[b][:, some] += p / shape.heads
    return out, lse, given, mean


def test_tiles_of_which_nothing_is_seen_are_not_loaded():
    """Behind the last visible slot, before the first, and between two the tile of another step stays."""
    seen = np.zeros((2, 2, 1, 1500), bool)
    seen[0, 0, 0, 100:300] = seen[0, 0, 0, 1200:1300] = 1
    seen[0, 1, 0, 600:700] = 1
    seen[1, 1] = 1
    ends = jnp.asarray([[1300, 700], [0, 1025]])
    loaded = tpu.loaded_tiles(ends, jnp.asarray(seen), 512, 3)
    np.testing.assert_array_equal(loaded, [[[0, 0, 2], [1, 1, 1]], [[0, 0, 0], [0, 1, 2]]])
    np.testing.assert_array_equal(tpu.loaded_tiles(ends[:, :1], None, 512, 3), [[[0, 1, 2]], [[0, 0, 0]]])


def all_three(of, q, k, v, lse, weight, mask, lengths):
    """The results of one implementation, as one program."""
    out, found_lse = of["attention"](q, k, v, mask, lengths)
    given = of["received"](q, k, lse, weight, mask, lengths)
    return out, found_lse, given, of["head_mean"](q, k, lse, mask, lengths)


def check(shape: Shape, arrays: Operands, found):
    out, lse, given, mean = found
    assert (out.dtype, lse.dtype) == (arrays.q.dtype, jnp.float32)
    assert (given.dtype, mean.dtype) == (jnp.float32, jnp.float32)
    q, k, v, sent_lse, *rest = arrays
    wanted = explicit(shape, q, k, v, *rest, idle=np.isneginf(sent_lse))
    real = slice(1, -1) if shape.queries > 1 else slice(None)  # the others are NaN
    tolerance = TOLERANCE if out.dtype == jnp.float32 else ROUNDED
    np.testing.assert_allclose(np.asarray(out[:, real], np.float32), wanted[0][:, real], **tolerance)
    np.testing.assert_allclose(lse[..., real], wanted[1][..., real], **TOLERANCE)
    np.testing.assert_allclose(given, wanted[2], **TOLERANCE)
    np.testing.assert_allclose(mean[:, real], wanted[3][:, real], **TOLERANCE)


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL, 3))
@pytest.mark.parametrize("name", some(IMPLEMENTATIONS, 2))
def test_equals_float64(name, shape, dtype, monkeypatch):
    monkeypatch.setattr(triton, "PROGRAMS", 8)  # so that a program for 700 slots walks over several tiles
    arrays = operands(shape, dtype)
    run = functools.partial(all_three, IMPLEMENTATIONS[name])
    if name == "triton" and shape.head == 24:
        with pytest.raises(NotImplementedError, match="head width 24"):
            run(*arrays)
        return
    check(shape, arrays, jax.jit(run)(*arrays))


@pytest.mark.skipif("mosaic_gpu" not in interpreted(ATTENTION), reason="jax has no interpreter of Mosaic GPU")
@pytest.mark.parametrize("shape", some(SMALL[:-1], 3), ids=str)
def test_mosaic_gpu_equals_float64(shape):
    arrays = operands(shape, jnp.bfloat16)
    q, k, v, given_lse, weight, mask, lengths = arrays
    out, lse = jax.jit(interpreted(ATTENTION)["mosaic_gpu"])(q, k, v, mask, lengths)
    given = jax.jit(interpreted(RECEIVED)["mosaic_gpu"])(q, k, given_lse, weight, mask, lengths)
    wanted = explicit(shape, *arrays[:3], *arrays[4:], idle=np.isneginf(given_lse))
    np.testing.assert_allclose(given, wanted[2], **TOLERANCE)
    real = slice(1, -1) if shape.queries > 1 else slice(None)  # the others are NaN
    np.testing.assert_allclose(np.asarray(out[:, real], np.float32), wanted[0][:, real], **ROUNDED)
    np.testing.assert_allclose(lse[..., real], wanted[1][..., real], **TOLERANCE)


@pytest.mark.parametrize("name", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_kernel_for_gpus_takes_masks_that_differ_between_queries(heads, name, monkeypatch):
    """Up to 128 queries of a sequence; slots that a tile of queries does not see may hold anything."""
    monkeypatch.setattr(triton, "PROGRAMS", 8)
    if name not in interpreted(ATTENTION):
        pytest.skip("jax has no interpreter of Mosaic GPU")
    kernel, dtype = interpreted(ATTENTION)[name], jnp.bfloat16 if name == "mosaic_gpu" else jnp.float32
    rng = np.random.default_rng(heads)
    drawn = lambda n, heads: rng.standard_normal((2, n, heads, 32)).astype(dtype)
    q, k, v = drawn(33, 6), drawn(150, 2), drawn(150, 2)
    mask = rng.random((2, heads, 33, 150)) < 0.3
    mask[..., 90:] = mask[:, :, 5] = mask[0, 0, :, :70] = False
    hidden = np.broadcast_to(~mask.any(axis=2), (2, 2, 150)).swapaxes(1, 2)
    k[hidden], v[hidden] = np.nan, np.nan
    arrays = [jnp.asarray(x) for x in (q, k, v, mask)]
    wanted = jax.jit(OPERATIONS["attention"].xla)(*arrays)
    tolerance = TOLERANCE if dtype == jnp.float32 else ROUNDED
    for found, of_xla in zip(jax.jit(kernel)(*arrays), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(of_xla, np.float32), **tolerance)
    assert np.isneginf(np.asarray(wanted[1])[:, :, 5]).all()
    many = jnp.broadcast_to(mask[:, :, :1], (2, heads, 129, 150)), jnp.zeros((2, 129, 6, 32), dtype)
    with pytest.raises(NotImplementedError, match="differs between query positions"):
        kernel(many[1], *arrays[1:3], many[0])


def test_calls_that_a_kernel_does_not_serve_are_named():
    for name, operation in OPERATIONS.items():
        said = explaining(operation)(*abstract(name, SMALL[-1], jnp.float32))
        assert "head width 24" in said["cuda"]
        assert "not measured" in said["tpu"]
    half = explain(*abstract("attention", SMALL[0], jnp.float16))
    assert half["tpu"] == "xla: q float16, v float16, k float16: all float32 or all bfloat16"
    narrow = explain(*abstract("attention", Shape(1, 2, 2, 2, 20, 8), jnp.float32))
    assert narrow["tpu"].startswith("xla: head width 20")
    assert "no slots" in explain(*abstract("attention", Shape(1, 2, 2, 2, 64, 0), jnp.float32))["cuda"]
    q, k, v, _, lengths = abstract("attention", SMALL[0], jnp.float32)
    by_query = jax.ShapeDtypeStruct((1, 1, SMALL[0].queries, SMALL[0].slots), jnp.bool_)
    assert explain(q, k, v, by_query, lengths)["tpu"] == "xla: the mask differs between query positions"


def test_nothing_to_attend_to_or_nobody_to_attend():
    for shape in (Shape(1, 2, 2, 1, 16, 0), Shape(1, 0, 2, 1, 16, 3)):
        q, k = (jnp.ones(x.shape) for x in abstract("attention", shape, jnp.float32)[:2])
        out, lse = jax.jit(ATTENTION.xla)(q, k, k)
        assert (out.shape, lse.shape) == (q.shape, (1, 2, shape.queries))
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -jnp.inf)
        reason = "xla: no slots" if shape.queries else "xla: no queries"
        assert explain(q, k, k)["tpu"] == explain(q, k, k)["cuda"] == reason


def test_a_platform_whose_kernel_does_not_support_a_call_takes_xla_though_others_do_not(caplog):
    narrow = abstract("attention", SMALL[-1], jnp.float32)
    with caplog.at_level("INFO", logger="pallas_kernels"):
        traced = jax.jit(functools.partial(attention, implementation="pallas")).trace(*narrow)
    assert "attention: on cuda XLA instead of a kernel: head width 24 is not in" in caplog.text
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "triton" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_shapes_that_do_not_go_together(unannotated):
    q, k, v, lse, weight, mask, lengths = operands(SMALL[0])
    for run in (attention, head_mean):
        with pytest.raises(ValueError, match=r"queries \(2, 5, 7, 128\) do not go with keys"):
            run(q[:, :, :7], k, v)
    with pytest.raises(ValueError, match=r"queries \(2, 5, 7, 128\) do not go with keys"):
        received(q[:, :, :7], k, lse, weight)
    for wrong in (mask[..., 1:], mask[:, 0, 0], jnp.ones((2, 3, 1, 150), bool)):
        with pytest.raises(ValueError, match=r"mask \(2, .*\) must be \(2, 2, 5, 150\), or 1 along any axis"):
            attention(q, k, v, wrong)
    with pytest.raises(ValueError, match=r"lengths \(2, 1\) must be \(2, 2\)"):
        attention(q, k, v, mask, lengths[:, :1])


def abstract(of: str, shape: Shape, dtype) -> list:
    """Operands of one operation as shapes."""
    struct = jax.ShapeDtypeStruct
    q = struct((shape.batch, shape.queries, shape.heads, shape.head), dtype)
    k = struct((shape.batch, shape.slots, shape.kv_heads, shape.head), dtype)
    lse = struct((shape.batch, shape.heads, shape.queries), jnp.float32)
    weight = struct((shape.batch, shape.queries), jnp.float32)
    masks = {
        "keys": (1, 1), "both": (1, 1), "keys per head": (shape.kv_heads, 1),
        "keys per query": (1, shape.queries),
    }  # fmt: skip
    axes = masks.get(shape.visible)
    mask = None if axes is None else struct((shape.batch, *axes, shape.slots), jnp.bool_)
    lengths = struct((shape.batch, shape.kv_heads), jnp.int32)
    seen = [mask, lengths if shape.visible in ("lengths", "both") else None]
    return {"attention": [q, k, k], "received": [q, k, lse, weight], "head_mean": [q, k, lse]}[of] + seen


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*reversed(SHARED), *SMALL], 4))
@pytest.mark.parametrize("of", OPERATIONS)
def test_compiles_for_tpu_v5e_if_libtpu_is_installed(of, shape, dtype, optimized):
    q, _, *rest = abstract(of, shape, dtype)
    swapped = 2 if of == "attention" else 1  # keys and values, or keys alone

    def by_heads(q, *arrays):
        """A cache that lies in memory as the kernel wants it."""
        pairs = (jnp.swapaxes(array, 1, 2) for array in arrays[:swapped])
        return OPERATIONS[of].kernels["tpu"](q, *pairs, *arrays[swapped:])

    heads_first = jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, shape.slots, shape.head), dtype)
    program = ahead_of_time.compiled_for_v5e(by_heads, q, *[heads_first] * swapped, *rest[swapped - 1 :])
    assert "tpu_custom_call" in program.as_text()
    # No copy of K or V and no scores or weights: one of the queries by head, of statistics two by kv head,
    # and columns, which take 512 bytes for each query.
    queries = shape.batch * shape.queries * shape.heads
    rows = shape.head * q.dtype.itemsize
    per_query = rows if of == "attention" else 2 * rows + 1024
    assert program.memory_analysis().temp_size_in_bytes < queries * per_query + 2**20


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*SHARED, *SMALL[:6]], 4))
@pytest.mark.parametrize("of", OPERATIONS)
def test_lowers_for_cuda(of, shape, dtype):
    with ahead_of_time.h100():
        traced = jax.jit(OPERATIONS[of].kernels["triton"]).trace(*abstract(of, shape, dtype))
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_masks_that_differ_between_queries_lower_for_cuda():
    (shape,) = ENTERING.values()
    with ahead_of_time.h100():
        traced = jax.jit(ATTENTION.kernels["triton"]).trace(*abstract("attention", shape, jnp.bfloat16))
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
