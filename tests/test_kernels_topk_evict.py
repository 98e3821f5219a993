"""`topk_evict`: every implementation against plain Python sorting; all comparisons are exact."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.topk_evict import OPERATION, topk_evict, xla
from pallas_kernels.topk_evict.xla import MODELS, SMALL, Shape

from . import ahead_of_time
from .kernel_cases import explaining, interpreted, some

explain = explaining(OPERATION)
KERNELS = OPERATION.kernels
IMPLEMENTATIONS = {
    **interpreted(OPERATION),
    "xla": xla.topk_evict,
    "reference": xla.reference,
}
each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def operands(shape: Shape, ties: bool = False):
    """Scores of either sign, some -inf, NaN or inf; counts from 0 to beyond what there is."""
    rng = np.random.default_rng(shape.length)
    size = shape.batch, shape.heads, shape.length
    score = rng.integers(-2, 3, size) * 0.5 if ties else rng.standard_normal(size)
    special = rng.choice([0, np.nan, -np.inf, np.inf], size, p=[0.6, 0.2, 0.1, 0.1])
    count = rng.integers(0, shape.width + 1, (shape.batch, shape.heads))
    count.flat[0], count.flat[-1] = 0, shape.width
    return jnp.asarray(np.float32(score + special)), jnp.asarray(count, jnp.int32)


def explicit(score, count, width):
    """One head at a time, by Python's stable sort."""
    score, count = map(np.asarray, (score, count))
    kept = np.full((*score.shape[:2], width), score.shape[2])
    for b, h in np.ndindex(*score.shape[:2]):
        some = np.flatnonzero(score[b, h] > -np.inf)
        best = sorted(some, key=lambda p: -score[b, h, p])
        best = sorted(best[: min(count[b, h], width)])
        kept[b, h, : len(best)] = best
    return kept


@functools.cache
def jitted(name, width):
    return jax.jit(functools.partial(IMPLEMENTATIONS[name], width=width))


@pytest.mark.parametrize(("shape", "ties"), some(itertools.product(SMALL, (True, False)), 1), ids=str)
@each_implementation
def test_equals_sorting(name, shape, ties):
    arrays = operands(shape, ties)
    found = jitted(name, shape.width)(*arrays)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, explicit(*arrays, shape.width))


special = st.sampled_from([-np.inf, -1e38, -1.0, -2e-38, -0.0, 0.0, 2e-38, 1.0, 1.0000001, np.inf])

SIGNED_ZEROS = np.tile(np.where(np.arange(11) % 2, 0.0, -0.0).astype(np.float32), (2, 2, 1))  # all tie


@settings(max_examples=20)
@given(
    hnp.arrays(np.float32, (2, 2, 11), elements=special.map(np.float32)),
    hnp.arrays(np.int32, (2, 2), elements=st.integers(0, 12)),
)
@example(SIGNED_ZEROS, np.full((2, 2), 3, np.int32))
def test_every_float_has_its_place(score, count):
    expected = explicit(score, count, 8)
    for name in IMPLEMENTATIONS.keys() - {"mosaic_gpu"}:  # whose interpreter takes seconds
        np.testing.assert_array_equal(jitted(name, 8)(score, count), expected, err_msg=name)


@pytest.mark.parametrize("backend", ["tpu", "triton"])
def test_kernels_bisect(backend):
    """All pairs of 1024 scores do not fit registers: the kernel would take half a minute to compile."""
    kernel = functools.partial(KERNELS[backend], width=9)
    text = str(jax.make_jaxpr(kernel)(*abstract(Shape(1, 32, 1024, 9))))
    assert "1024,1024" not in text
    assert "scan[" in text


@pytest.mark.parametrize("lines", [1, 3])
def test_many_lines_are_bisected_and_few_compared(lines):
    """XLA's two ways to mark the best give the same."""
    score, count = operands(Shape(1, lines, 1500, 700), ties=True)
    many = lines * 1500**2 > xla.COMPARABLE**2
    jaxpr = str(jax.make_jaxpr(xla.best)(score[0], count[0, :, None]))
    assert ("scan[" in jaxpr) == many
    np.testing.assert_array_equal(jitted("xla", 700)(score, count), explicit(score, count, 700))


def test_calls_that_a_kernel_does_not_serve_are_named():
    shapes = abstract(Shape(1, 1, 2**15 + 1, 4))
    assert explain(*shapes, width=4)["cuda"] == "xla: 32769 positions: at most 32768"
    shapes = abstract(Shape(1, 1, 2**17 + 1, 4))
    assert explain(*shapes, width=4)["tpu"] == "xla: 131073 positions: at most 131072"
    assert "131073 positions" in OPERATION.explain(tuple(shapes), dict(width=4), "pallas")["cpu"]


def test_bad_options():
    score, count = operands(Shape(1, 2, 9, 4))
    with pytest.raises(ValueError, match="width=-1 must be at least 0"):
        topk_evict(score, count, -1)
    with pytest.raises(ValueError, match="score is bfloat16, must be float32"):
        topk_evict(score.astype(jnp.bfloat16), count, 4)


def abstract(shape: Shape) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.length), jnp.float32),
        jax.ShapeDtypeStruct((shape.batch, shape.heads), jnp.int32),
    ]


@pytest.mark.parametrize("shape", some([*reversed(MODELS.values()), *SMALL], 2), ids=str)
def test_compiles_for_tpu_v5e_if_libtpu_is_installed(shape, optimized):
    call = functools.partial(KERNELS["tpu"], width=shape.width)
    assert "tpu_custom_call" in ahead_of_time.compiled_for_v5e(call, *abstract(shape)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("shape", some([*MODELS.values(), *SMALL], 3), ids=str)
def test_lowers_for_cuda(shape):
    call = functools.partial(KERNELS["triton"], width=shape.width)
    with ahead_of_time.h100():
        lowered = jax.jit(call).trace(*abstract(shape)).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()
