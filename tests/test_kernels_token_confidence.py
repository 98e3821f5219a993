"""`token_confidence`: every implementation against float64 numpy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.samplers import scores
from pallas_kernels.token_confidence import OPERATION, reference, token_confidence, tpu, xla
from pallas_kernels.token_confidence.shapes import MODELS, SMALL, Shape

from . import ahead_of_time
from .kernel_cases import explaining, in_both_dtypes, some

explain = explaining(OPERATION)
KERNELS = OPERATION.kernels
IMPLEMENTATIONS = {  # the first three in every test run; where there is one tile, "xla" is all the same
    **{platform: functools.partial(kernel, interpret=True) for platform, kernel in KERNELS.items()},
    "xla in tiles of 96": functools.partial(xla.token_confidence, tile=96),
    "xla": xla.token_confidence,
    "reference": reference.token_confidence,
}
each_implementation = pytest.mark.parametrize("name", some(IMPLEMENTATIONS, 3))
SHARED = Shape(1, 4, 128, 700, forbidden=128)  # one program for several tests
# float32 sums of up to 2500 terms, logits up to about 15. bfloat16 operands have exact float32 products.
TOLERANCE = dict(rtol=2e-5, atol=5e-6)


def operands(shape: Shape, dtype=jnp.float32):
    """Hidden states and head; logits have a standard deviation of 3, padding tokens are NaN."""
    rng = np.random.default_rng(shape.vocabulary)
    hidden = rng.standard_normal((shape.batch, shape.positions, shape.width))
    head = rng.standard_normal((shape.vocabulary, shape.width)) * 3 / math.sqrt(shape.width)
    head[shape.valid :] = np.nan if shape.valid else head[shape.valid :]
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype)


def abstract(shape: Shape, dtype) -> list[jax.ShapeDtypeStruct]:
    hidden = jax.ShapeDtypeStruct((shape.batch, shape.positions, shape.width), dtype)
    return [hidden, jax.ShapeDtypeStruct((shape.vocabulary, shape.width), dtype)]


def explicit(hidden, head, valid=None, forbidden=None):
    """Token, probability, margin, negative entropy by float64 numpy."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)[:valid].T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = (p * np.log(p)).sum(-1)
    candidates = p.copy()
    if forbidden is not None:
        candidates[..., forbidden] = 0
    order = np.sort(candidates, axis=-1)
    return candidates.argmax(-1), order[..., -1], order[..., -1] - order[..., -2], entropy


def run(name, hidden, head, valid=None, forbidden=None):
    """The implementation, jitted."""
    return jitted(name, valid, forbidden)(hidden, head)


@functools.cache
def jitted(name, valid, forbidden):
    return jax.jit(functools.partial(IMPLEMENTATIONS[name], valid=valid, forbidden=forbidden))


def check(found, expected):
    assert [x.dtype for x in found] == [jnp.int32, *[jnp.float32] * 3]
    np.testing.assert_array_equal(found.token, expected[0])
    for ours, wanted in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(ours, wanted, **TOLERANCE)


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL, 2))
@each_implementation
def test_equals_float64(name, shape, dtype):
    hidden, head = operands(shape, dtype)
    options = dict(valid=shape.valid, forbidden=shape.forbidden)
    check(run(name, hidden, head, **options), explicit(hidden, head, **options))


@each_implementation
def test_ties_go_to_the_lowest_id_and_have_no_margin(name):
    hidden, head = (np.array(x) for x in operands(SHARED))
    best = np.delete(np.arange(700), 128)[np.delete(hidden[0] @ head.T, 128, axis=1).argmax(-1)]
    for position, twins in enumerate([(5, 6), (0, 699), (255, 256), (300, 650)]):  # in a tile, across tiles
        head[list(twins)] = 2 * head[best[position]]
    winners = hidden[0].astype(np.float64) @ head.astype(np.float64).T
    winners[:, 128] = -np.inf
    expected = winners.argmax(-1)  # of equal ones the first
    assert set(expected) <= {5, 0, 255, 300}
    found = run(name, hidden, head, forbidden=128)
    np.testing.assert_array_equal(found.token[0], expected)
    np.testing.assert_array_equal(found.margin, 0)


@pytest.mark.exhaustive
@each_implementation
def test_all_logits_equal(name):
    found = run(name, jnp.zeros((1, 2, 128)), jnp.ones((333, 128)), valid=300, forbidden=0)
    np.testing.assert_array_equal(found.token, 1)
    np.testing.assert_array_equal(found.margin, 0)
    np.testing.assert_allclose(found.probability, 1 / 300, rtol=1e-6)
    np.testing.assert_allclose(found.negative_entropy, -math.log(300), rtol=1e-6)


@pytest.mark.parametrize("place", some([128, 0, 127, 699], 1))
@each_implementation
def test_a_forbidden_token_counts_in_the_softmax_alone(name, place):
    hidden, head = (np.array(x) for x in operands(SHARED))
    head[place] = 0.2 * hidden[0, 1]  # by far the best of position 1
    expected = explicit(hidden, head, forbidden=place)
    assert explicit(hidden, head)[0][0, 1] == place
    assert expected[1][0, 1] < 0.01  # the rest is left little
    check(run(name, hidden, head, forbidden=place), expected)


@pytest.mark.exhaustive
@each_implementation
def test_only_one_token_may_be_chosen(name):
    hidden, head = operands(Shape(1, 3, 128, 300))
    check(run(name, hidden, head, valid=2, forbidden=0), explicit(hidden, head, 2, 0))
    alone = run(name, hidden, head, valid=1)
    np.testing.assert_array_equal([alone.probability, alone.margin], 1)
    np.testing.assert_array_equal([alone.token, alone.negative_entropy], 0)


@pytest.mark.exhaustive  # NaN is in `test_equals_float64` too
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, 1e30], ids=str)
@each_implementation
def test_padding_tokens_have_no_influence(name, poison):
    hidden, head = operands(Shape(1, 7, 128, 400, valid=270))
    clean = run(name, hidden, head[:270])
    found = run(name, hidden, head.at[270:].set(poison), valid=270)
    for ours, wanted in zip(found, clean, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-6, atol=1e-6)


@each_implementation
def test_a_position_that_holds_anything_has_no_influence_on_others(name):
    hidden, head = (np.array(x) for x in operands(SHARED))
    clean = run(name, hidden, head, forbidden=128)
    hidden[0, 3] = np.nan
    others = np.arange(4) != 3
    for ours, wanted in zip(run(name, hidden, head, forbidden=128), clean, strict=True):
        np.testing.assert_array_equal(ours[0, others], wanted[0, others])


@pytest.mark.exhaustive
@pytest.mark.parametrize("offset", [-3e4, 3e4])
@each_implementation
def test_large_logits_do_not_overflow(name, offset):
    head = jnp.arange(300.0)[:, None] / 64 + jnp.zeros((300, 128)).at[:, 0].set(offset)
    hidden = jnp.zeros((1, 2, 128)).at[..., :2].set(1.0)
    check(run(name, hidden, head), explicit(hidden, head))


@pytest.mark.parametrize("name", some(reversed(IMPLEMENTATIONS), 1))
def test_is_what_the_samplers_compute_from_logits(name):
    hidden, head = operands(Shape(2, 5, 128, 300))
    logits = jnp.einsum("bcm,vm->bcv", hidden, head, precision="highest")
    found = run(name, hidden, head, forbidden=17)
    np.testing.assert_array_equal(found.token, jnp.argmax(logits.at[..., 17].set(-jnp.inf), axis=-1))
    np.testing.assert_allclose(found.probability, scores.probability(logits, found.token), **TOLERANCE)
    np.testing.assert_allclose(found.margin, scores.margin(logits, 17), **TOLERANCE)
    np.testing.assert_allclose(found.negative_entropy, scores.negative_entropy(logits), **TOLERANCE)


@pytest.mark.parametrize("implementation", some(["pallas", None, "xla"], 1))
def test_every_choice_gives_the_same(implementation):
    hidden, head = operands(SMALL[1])
    options = dict(valid=SMALL[1].valid, forbidden=SMALL[1].forbidden)
    chosen = functools.partial(token_confidence, **options, implementation=implementation)
    expected = explicit(hidden, head, **options)
    check(jax.jit(chosen)(hidden, head), expected)


def test_what_a_kernel_does_not_serve_falls_through_to_xla_and_says_so(caplog):
    hidden, head = operands(Shape(1, 3, 100, 300))
    chosen = dataclasses.replace(OPERATION, preferred=("tpu", "cuda"))
    assert "width 100" in explain(hidden, head)["tpu"]
    with caplog.at_level("INFO", logger="pallas_kernels"):
        found = jax.jit(lambda *arrays: chosen.run(arrays, {}, None))(hidden, head)
    check(found, explicit(hidden, head))
    assert "token_confidence: on tpu XLA instead of a kernel: width 100" in caplog.text
    half = OPERATION.explain(operands(SMALL[0], jnp.float16), {}, "pallas")
    assert all("float16" in reason for reason in half.values())


def test_no_positions():
    hidden, head = jnp.ones((1, 0, 128)), jnp.ones((300, 128))
    for function in (reference.token_confidence, xla.token_confidence):
        assert [x.shape for x in jax.eval_shape(function, hidden, head)] == [(1, 0)] * 4
    assert explain(hidden, head)["tpu"] == explain(hidden, head)["cuda"] == "xla: no positions"


def test_a_kernel_is_the_default_only_where_it_was_measured_to_be_faster():
    arrays = operands(SMALL[0])
    chosen = dataclasses.replace(OPERATION, preferred=("tpu",))
    assert chosen.explain(arrays, {}, None)["tpu"] == "pallas"
    assert "not measured" in chosen.explain(arrays, {}, None)["cuda"]
    assert OPERATION.preferred == ()
    for operation, lowered in ((chosen, True), (OPERATION, False)):
        traced = jax.jit(lambda *arrays, of=operation: of.run(arrays, {}, None)).trace(*arrays)
        assert ("tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()) is lowered
        assert "triton" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(valid=301), r"valid=301 must lie in \[1, 300\]"),
        (dict(valid=0), r"valid=0 must lie in \[1, 300\]"),
        (dict(valid=1, forbidden=0), r"valid=1 must lie in \[2, 300\]"),
        (dict(valid=5, forbidden=5), r"forbidden=5 must lie in \[0, 5\)"),
        (dict(forbidden=-1), r"forbidden=-1 must lie in"),
        (dict(implementation="triton"), r"implementation='triton' must be"),
    ],
    ids=str,
)
def test_bad_options(options, message, unannotated):
    with pytest.raises(ValueError, match=message):
        token_confidence(*operands(Shape(1, 3, 128, 300)), **options)


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*SMALL[:2], *MODELS.values(), *SMALL[2:]], 4))
def test_compiles_for_tpu_v5e_if_libtpu_is_installed(shape, dtype, optimised):
    call = functools.partial(KERNELS["tpu"], valid=shape.valid, forbidden=shape.forbidden)
    program = ahead_of_time.compiled_for_v5e(call, *abstract(shape, dtype))
    assert "tpu_custom_call" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 2**20  # no logits


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes([*MODELS.values(), *SMALL], 3))
def test_lowers_for_cuda(shape, dtype):
    call = functools.partial(KERNELS["cuda"], valid=shape.valid, forbidden=shape.forbidden)
    with ahead_of_time.h100():
        lowered = jax.jit(call).trace(*abstract(shape, dtype)).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


def test_the_v5e_compiler_rejects_what_does_not_fit_if_libtpu_is_installed(monkeypatch, optimised):
    monkeypatch.setattr(tpu, "VMEM_BYTES", 2**22)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        ahead_of_time.compiled_for_v5e(KERNELS["tpu"], *abstract(MODELS["llada-8b"], jnp.bfloat16))
