"""`experts`: every implementation against a plain loop over tokens and their choices, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.experts import OPERATION, triton, xla
from pallas_kernels.experts.shapes import MODELS, SMALL, Shape
from pallas_kernels.experts.tiles import tiles_of

from . import ahead_of_time
from .kernel_cases import DTYPES, explaining, in_both_dtypes

explain = explaining(OPERATION)
IMPLEMENTATIONS = {
    "by expert": xla.by_expert,
    "by tiles": xla.by_tiles,
    "by all experts": xla.by_all_experts,
    "by all experts, 2 tokens at a time": functools.partial(xla.by_all_experts, wide_bytes=1500),
    "triton": functools.partial(OPERATION.kernels["triton"], interpret=True),
}
each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)


tiled = jax.jit(tiles_of, static_argnums=(1, 2))


def operands(shape: Shape, dtype=jnp.float32, int8=False):
    """Random routing; the second choice of each third token is an expert that is not here."""
    t, c, e, m, i = shape
    rng = np.random.default_rng(t)
    draw = lambda *size: rng.standard_normal(size, np.float32)
    chosen = np.argsort(rng.random((t, e)), axis=1)[:, :c].astype(np.int32)
    if c > 1:
        chosen[::3, 1] = e
    weight = jnp.asarray(rng.random((t, c)), jnp.float32)
    sizes = (e, m, i), (e, m, i), (e, i, m)
    if not int8:
        matrices = (jnp.asarray(draw(*size) / 8, dtype) for size in sizes)
        return jnp.asarray(draw(t, m), dtype), jnp.asarray(chosen), weight, *matrices
    values = (jnp.asarray(rng.integers(-127, 128, size), jnp.int8) for size in sizes)
    scales = (jnp.asarray(rng.random((e, size[2])) / 1000 + 1e-4, jnp.float32) for size in sizes)
    return jnp.asarray(draw(t, m), dtype), jnp.asarray(chosen), weight, *values, *scales


def by_hand(tokens, chosen, weight, *matrices) -> np.ndarray:
    """One expert after the other, as its rows lie."""
    wide = [np.asarray(x, np.float64) for x in matrices]
    if len(wide) > 3:
        wide = [values * scale[:, None] for values, scale in zip(wide[:3], wide[3:], strict=True)]
    tokens, chosen, weight = np.asarray(tokens, np.float64), np.asarray(chosen), np.asarray(weight)
    out = np.zeros_like(tokens)
    for e, (gate, up, down) in enumerate(zip(*wide, strict=True)):
        for t, c in np.argwhere(chosen == e):
            gated = tokens[t] @ gate
            out[t] += weight[t, c] * (gated / (1 + np.exp(-gated)) * (tokens[t] @ up) @ down)
    return out


def assert_near(found, arrays, dtype):
    """Within rounding: what is between the products is rounded to the dtype, sums of them too."""
    wanted = by_hand(*arrays)
    scale = np.abs(wanted).max() or 1
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found) / scale, wanted / scale, atol=tolerance)


@pytest.mark.parametrize(("shape", "dtype"), in_both_dtypes(SMALL, 2))
@pytest.mark.parametrize("int8", [False, True])
@each_implementation
def test_each_token_gets_the_sum_of_its_experts(name, int8, shape, dtype):
    arrays = operands(shape, dtype, int8)
    assert_near(jax.jit(IMPLEMENTATIONS[name])(*arrays), arrays, dtype)


@pytest.mark.parametrize("tokens", [40, 700])
def test_all_tokens_to_one_expert_and_to_none(tokens):
    """Of one expert several whole tiles and a part; of the others, and of no expert, no tile at all."""
    x, _, weight, *matrices = operands(Shape(tokens, 1, 3, 16, 8))
    for expert in (0, 2, 3):
        chosen = np.full((tokens, 1), expert, np.int32)
        for name, of in IMPLEMENTATIONS.items():
            if "2 tokens" not in name:
                arrays = x, chosen, weight, *matrices
                assert_near(jax.jit(of)(*arrays), arrays, x.dtype)
        rows = triton.MOST_ROWS if tokens == 700 else triton.LEAST_ROWS
        tiles = tiled(chosen.reshape(-1), 3, rows)
        real = np.asarray(tiles.first < tiles.end)
        assert real.sum() == (0 if expert == 3 else -(-tokens // rows))
        assert set(np.asarray(tiles.expert)[real]) <= {expert}


def test_tiles_cover_each_row_once_whatever_the_router_decides():
    rng = np.random.default_rng(0)
    for rows, count in ((16, 7), (4, 64), (1, 3)):
        for skew in (0.1, 1, 5):
            expert = np.minimum(rng.exponential(skew * count / 2, 100).astype(np.int32), count)
            order, of, first, end = map(np.asarray, tiled(expert, count, rows))
            covered = [(order[p], e) for e, a, b in zip(of, first, end, strict=True) for p in range(a, b)]
            assert sorted(covered) == [(r, e) for r, e in enumerate(expert) if e < count]
            assert (end - first).max() <= rows


def test_outputs_of_all_experts_for_many_tokens_are_never_in_memory_at_once():
    shape = Shape(512, 2, 16, 32, 64)
    compiled = lambda most: (
        jax.jit(functools.partial(xla.by_all_experts, wide_bytes=most)).lower(*operands(shape)).compile()
    )
    whole, parts = (compiled(most).memory_analysis().temp_size_in_bytes for most in (2**30, 2**18))
    assert whole > 4 * 512 * 16 * 64
    assert parts < whole / 4


def test_calls_that_the_kernel_does_not_serve_are_named():
    shape = SMALL[0]
    asked = lambda arrays: OPERATION.explain(arrays, {}, "pallas")
    assert asked(operands(shape)) == {
        "cpu": "pallas, interpreted", "cuda": "triton", "tpu": "xla: no kernel for this platform",
    }  # fmt: skip
    assert explain(*operands(shape))["cuda"] == "xla: the kernel was not measured to be faster"
    assert asked(operands(shape, jnp.float16))["cuda"] == "xla: float16: float32 or bfloat16"
    mixed = (operands(shape, jnp.bfloat16)[0], *operands(shape)[1:])
    assert asked(mixed)["cuda"] == "xla: a matrix in float32: int8 or the tokens' bfloat16"
    none = (operands(shape)[0][:0], *(x[:0] for x in operands(shape)[1:3]), *operands(shape)[3:])
    assert asked(none)["cuda"] == "xla: no tokens"


def test_shapes_that_do_not_go_together(unannotated):
    x, chosen, weight, gate, up, down = operands(SMALL[0])
    run = lambda *arrays: OPERATION.run(arrays, {}, None)
    with pytest.raises(ValueError, match=r"choices \(37, 3\) and weights \(37, 2\) must be of 37 tokens"):
        run(x, chosen, weight[:, :2], gate, up, down)
    with pytest.raises(ValueError, match=r"must be \[e m i\], \[e m i\] and \[e i m\] for tokens"):
        run(x, chosen, weight, gate, up, gate)
    with pytest.raises(ValueError, match="a matrix in float32: int8 ones have a scale, others none"):
        run(x, chosen, weight, gate, up, down, gate[:, 0], None, None)


def abstract(shape: Shape, dtype, int8: bool) -> list[jax.ShapeDtypeStruct]:
    t, c, e, m, i = shape
    of, held = jax.ShapeDtypeStruct, jnp.int8 if int8 else dtype
    matrices = [of(size, held) for size in ((e, m, i), (e, m, i), (e, i, m))]
    scales = [of((e, size), jnp.float32) for size in (i, i, m)] if int8 else []
    return [of((t, m), dtype), of((t, c), jnp.int32), of((t, c), jnp.float32), *matrices, *scales]


@pytest.mark.parametrize(
    ("shape", "in_tiles"),
    [
        (MODELS["llada2-mini, a block of 32"], True),
        (MODELS["sdar-moe, a block of 4, batch 8"], True),
        (Shape(256, 4, 32, 256, 96), True),
        (Shape(256, 4, 4, 256, 96), False),  # every token to every expert
        (Shape(256, 4, 32, 32, 96), False),  # small matrices
    ],
)
def test_cpus_loop_over_tiles_where_these_are_less_work(shape, in_tiles):
    lowered = jax.jit(OPERATION.xla).lower(*abstract(shape, jnp.float32, int8=False)).as_text()
    assert ("dynamic_update_slice" in lowered) == in_tiles


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [MODELS["llada2-mini, a block of 32"], SMALL[0]])
def test_lowers_for_cuda(shape, dtype, int8):
    with ahead_of_time.h100():
        traced = jax.jit(OPERATION.kernels["triton"]).trace(*abstract(shape, dtype, int8))
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert "experts_gated" in lowered.as_text()
    assert "experts_down" in lowered.as_text()
