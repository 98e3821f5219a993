"""`row_attention`: every implementation against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.nn.attention import attention
from pallas_kernels.row_attention import OPERATION, gpu, reference, row_attention, xla
from pallas_kernels.row_attention.shapes import MODELS, SMALL, Shape

from . import ahead_of_time
from .kernel_cases import explaining, in_both_dtypes, some

explain = explaining(OPERATION)
KERNELS = OPERATION.kernels
IMPLEMENTATIONS = {
    "reference": reference.row_attention,
    "xla": xla.row_attention,
    "xla in tiles of 40": functools.partial(xla.row_attention, tile=40),
    **{platform: functools.partial(kernel, interpret=True) for platform, kernel in KERNELS.items()},
}
each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
# float32 sums of up to 700 terms, scores up to about 15; bfloat16 operands have exact float32 products.
# In bfloat16 weights and results are rounded to 8 bits: values of size 1 are off by 1/128 at most.
TOLERANCE = dict(rtol=2e-5, atol=1e-5)
ROUNDED = dict(rtol=1 / 128, atol=1 / 128)


def operands(shape: Shape, dtype=jnp.float32) -> list:
    """Queries, keys, values, mask and lengths, the first head's 0, the last one's full; invisible slots and
    the last of several query rows are NaN."""
    rng = np.random.default_rng(shape.slots)
    batch, slots, kv_heads = shape.batch, shape.slots, shape.kv_heads
    q = rng.standard_normal((batch, shape.rows, shape.heads, shape.head)) * 3
    k, v = rng.standard_normal((2, batch, slots, kv_heads, shape.head))
    mask = lengths = None
    if shape.seen in ("lengths", "both"):
        lengths = rng.integers(0, slots + 1, (batch, kv_heads))
        lengths.flat[0], lengths.flat[-1] = 0, slots
    if shape.seen in ("keys", "keys per head", "both"):
        mask = rng.random((batch, slots) if shape.seen != "keys per head" else (batch, kv_heads, slots)) < 0.6
        mask.reshape(-1, slots)[0, slots // 2 :] = False  # an end without any visible slot
    hidden = ~np.moveaxis(visible(shape, mask, lengths), 1, 2)
    k[hidden], v[hidden] = np.nan, np.nan
    if shape.rows > 1:
        q[:, -1] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    return [*arrays, *(None if x is None else jnp.asarray(x) for x in (mask, lengths))]


def visible(shape: Shape, mask, lengths):
    """Bool[b k s]."""
    seen = np.ones((shape.batch, shape.kv_heads, shape.slots), bool)
    if mask is not None:
        seen &= mask[:, None] if mask.ndim == 2 else mask
    if lengths is not None:
        seen &= np.arange(shape.slots) < lengths[..., None]
    return seen


def explicit(shape: Shape, q, k, v, mask, lengths):
    """Attention and log-sum-exp, one head at a time, by float64 numpy."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    seen = visible(shape, *(None if x is None else np.asarray(x) for x in (mask, lengths)))
    out, lse = np.zeros(q.shape), np.full((shape.batch, shape.heads, shape.rows), -np.inf)
    for b, h in np.ndindex(shape.batch, shape.heads):
        group = h * shape.kv_heads // shape.heads
        some = seen[b, group]
        if some.any():
            scores = q[b, :, h] @ k[b, some, group].T / np.sqrt(shape.head)
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            out[b, :, h] = weights @ v[b, some, group] / weights.sum(-1, keepdims=True)
            lse[b, h] = (top + np.log(weights.sum(-1, keepdims=True)))[:, 0]
    return out, lse


def check(shape: Shape, arrays, found):
    assert (found.out.dtype, found.lse.dtype) == (arrays[0].dtype, jnp.float32)
    out, lse = explicit(shape, *arrays)
    rows = slice(None, -1 if shape.rows > 1 else None)
    tolerance = TOLERANCE if found.out.dtype == jnp.float32 else ROUNDED
    np.testing.assert_allclose(found.out[:, rows].astype(jnp.float32), out[:, rows], **tolerance)
    np.testing.assert_allclose(found.lse[..., rows], lse[..., rows], **TOLERANCE)


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL, 4))
@each_implementation
def test_equals_float64(name, shape, dtype):
    arrays = operands(shape, dtype)
    if name == "cuda" and shape.head == 24:
        with pytest.raises(NotImplementedError, match="head width 24"):
            IMPLEMENTATIONS[name](*arrays)
        return
    check(shape, arrays, jax.jit(IMPLEMENTATIONS[name])(*arrays))


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL[2:4], 1))
def test_a_program_walks_over_several_tiles(shape, dtype, monkeypatch):
    """With so few programs as long caches have; short ones leave one tile to each."""
    monkeypatch.setattr(gpu, "PROGRAMS", 8)
    arrays = operands(shape, dtype)
    check(shape, arrays, jax.jit(functools.partial(gpu.row_attention, interpret=True))(*arrays))


@pytest.mark.exhaustive
@pytest.mark.parametrize("offset", [-3e4, 3e4])
@each_implementation
def test_large_scores_do_not_overflow(name, offset):
    shape = Shape(1, 1, 2, 1, 64, 150)
    q, k, v, *rest = operands(shape)
    q, k = q.at[..., 0].set(8.0), k.at[..., 0].set(offset)
    # scores near 3e4 are 2^-9 apart in float32
    wanted = explicit(shape, q, k, v, *rest)
    found = jax.jit(IMPLEMENTATIONS[name])(q, k, v, *rest)
    np.testing.assert_allclose(found.out, wanted[0], atol=0.05)
    np.testing.assert_allclose(found.lse, wanted[1], rtol=1e-6)


def test_is_what_attention_computes():
    q, k, v, mask, lengths = operands(SMALL[0])
    seen = jnp.asarray(visible(SMALL[0], np.asarray(mask), np.asarray(lengths)))[:, :, None]
    wanted = jax.jit(attention)(q, k, v, seen)
    found = jax.jit(xla.row_attention)(q, k, v, mask, lengths)
    np.testing.assert_allclose(found.out, wanted[0], **TOLERANCE)
    np.testing.assert_allclose(found.lse, wanted[1], **TOLERANCE)


@pytest.mark.parametrize("implementation", some(["pallas", None, "xla"], 1))
def test_every_choice_gives_the_same(implementation):
    arrays = operands(SMALL[1])
    check(SMALL[1], arrays, jax.jit(functools.partial(row_attention, implementation=implementation))(*arrays))


def test_what_a_kernel_does_not_serve_is_said():
    half = abstract(SMALL[0], jnp.float16)
    assert explain(*half)["tpu"] == "xla: q float16, v float16, k float16: all float32 or all bfloat16"
    assert "head width 24" in explain(*abstract(SMALL[-1], jnp.float32))["cuda"]
    assert explain(*abstract(Shape(1, 2, 2, 2, 20, 8), jnp.float32))["tpu"].startswith("xla: head width 20")
    assert "no slots" in explain(*abstract(Shape(1, 2, 2, 2, 64, 0), jnp.float32))["cuda"]
    assert "not measured" in explain(*abstract(SMALL[0], jnp.float32))["tpu"]
    with pytest.raises(NotImplementedError, match=r"tpu: q float16.*cuda: q float16"):
        jax.eval_shape(functools.partial(row_attention, implementation="pallas"), *half)


@pytest.mark.parametrize("shape", [Shape(1, 2, 2, 1, 16, 0), Shape(1, 0, 2, 1, 16, 3)], ids=["slots", "rows"])
def test_nothing_to_attend_to_or_nobody_to_attend(shape):
    q, k = (jnp.ones(x.shape) for x in abstract(shape, jnp.float32)[:2])
    for run in (reference.row_attention, xla.row_attention):
        out, lse = run(q, k, k)
        assert (out.shape, lse.shape) == (q.shape, (1, 2, shape.rows))
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -jnp.inf)
    reason = "xla: no slots" if shape.rows else "xla: no rows"
    assert explain(q, k, k)["tpu"] == explain(q, k, k)["cuda"] == reason


def test_pallas_says_why_a_platform_cannot_though_another_can():
    narrow = abstract(SMALL[-1], jnp.float32)
    traced = jax.jit(functools.partial(row_attention, implementation="pallas")).trace(*narrow)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    with pytest.raises(NotImplementedError, match="cuda: head width 24 is not in"):
        traced.lower(lowering_platforms=("cuda",))


def test_shapes_that_do_not_go_together(unannotated):
    q, k, v, mask, lengths = operands(SMALL[0])
    with pytest.raises(ValueError, match=r"queries \(2, 5, 7, 64\) do not go with keys"):
        row_attention(q[:, :, :7], k, v)
    with pytest.raises(ValueError, match=r"mask \(2, 149\) must be \(2, 150\) or \(2, 2, 150\)"):
        row_attention(q, k, v, mask[:, 1:])
    with pytest.raises(ValueError, match=r"lengths \(2, 1\) must be \(2, 2\)"):
        row_attention(q, k, v, mask, lengths[:, :1])


def abstract(shape: Shape, dtype) -> list:
    struct = jax.ShapeDtypeStruct
    q = struct((shape.batch, shape.rows, shape.heads, shape.head), dtype)
    k = struct((shape.batch, shape.slots, shape.kv_heads, shape.head), dtype)
    keys = struct((shape.batch, shape.slots), jnp.bool_)
    per_head = struct((shape.batch, shape.kv_heads, shape.slots), jnp.bool_)
    lengths = struct((shape.batch, shape.kv_heads), jnp.int32)
    mask = {"keys": keys, "both": keys, "keys per head": per_head}.get(shape.seen)
    return [q, k, k, mask, lengths if shape.seen in ("lengths", "both") else None]


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*SMALL[:2], *MODELS.values(), *SMALL[2:]], 6))
def test_compiles_for_tpu_v5e_if_libtpu_is_installed(shape, dtype, optimised):
    def by_heads(q, k, v, *seen):
        """A cache that lies in memory as the kernel wants it."""
        return KERNELS["tpu"](q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), *seen)

    q, k, _, *seen = abstract(shape, dtype)
    heads_first = jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, shape.slots, shape.head), dtype)
    program = ahead_of_time.compiled_for_v5e(by_heads, q, heads_first, heads_first, *seen)
    assert "tpu_custom_call" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < max(k.size, 2**20)  # no copy of K or V, no scores


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*MODELS.values(), *SMALL[:6]], 4))
def test_lowers_for_cuda(shape, dtype):
    with ahead_of_time.h100():
        lowered = jax.jit(KERNELS["cuda"]).trace(*abstract(shape, dtype)).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()
