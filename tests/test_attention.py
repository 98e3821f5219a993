"""Attention against explicit float64 softmax; what masked slots and idle queries may not do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from pallas_kernels.attention import xla
from pallas_kernels.attention.xla import (
    TURNS,
    attention,
    attention_by_sequence,
    head_mean,
    length_mask,
    queries_at_once,
    received,
)
from pallas_kernels.attention.xla import _in_one_product as in_one_product
from pallas_kernels.attention.xla import _products as products

HEADS, KV_HEADS, HEAD = 4, 2, 128
B, Q, S = 2, 5, 9

run = jax.jit(attention)


@functools.partial(jax.jit, static_argnames="chunk")
def statistics(q, k, lse, weight, mask=None, chunk=None):
    """What is read from the weights afterwards: received, and the mean over heads."""
    return received(q, k, lse, weight, mask, chunk=chunk), head_mean(q, k, lse, mask, chunk=chunk)


def operands():
    """Random q, k, v; scores have a standard deviation of about 2."""
    rng = np.random.default_rng(4128)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return 2 * draw(B, Q, HEADS, HEAD), draw(B, S, KV_HEADS, HEAD), draw(B, S, KV_HEADS, HEAD)


def explicit(q, k, v, mask=True):
    """Weights [b h q s], output [b q h d] and log-sum-exp [b h q] in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, HEADS // KV_HEADS, axis=2) for a in (k, v))
    scores = np.where(mask, np.einsum("bqhd,bshd->bhqs", q, k) / np.sqrt(HEAD), -np.inf)
    lse = logsumexp(scores, axis=-1)
    weights = np.exp(scores - lse[..., None])
    return weights, np.einsum("bhqs,bshd->bqhd", weights, v), lse


def test_masks_that_differ_by_query_in_chunks_and_at_once():
    """Everything else, statistics included, is compared with float64 in test_kernels_attention.py."""
    q, k, v = operands()
    mask = np.random.default_rng(1).random((B, 1, Q, S)) < 0.5
    mask[..., 0] = True
    weights, expected, expected_lse = explicit(q, k, v, mask)
    weight = np.random.default_rng(2).random((B, Q)).astype(np.float32)
    by_kv_head = weights.reshape(B, KV_HEADS, -1, Q, S)
    given = (by_kv_head * weight[:, None, None, :, None]).sum(axis=(2, 3))
    for chunk in (None, 2):
        out, lse = jax.jit(functools.partial(attention, chunk=chunk))(q, k, v, jnp.asarray(mask))
        found = out, lse, *statistics(q, k, lse, jnp.asarray(weight), jnp.asarray(mask), chunk)
        for ours, wanted in zip(found, (expected, expected_lse, given, weights.mean(1)), strict=True):
            np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = operands()
    out, lse = run(80 * q, k, v)
    _, expected, expected_lse = explicit(80 * q, k, v)
    assert 200 < expected_lse.max() < 700  # beyond exp's range in float32, within it in float64
    np.testing.assert_allclose(out, expected, atol=1e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-4)


def test_gradient_is_finite_where_nothing_is_attended_to():
    q, k, v = operands()
    mask = length_mask(jnp.asarray([[0, 3], [S, 0]], jnp.int32), S)
    grads = jax.jit(jax.grad(lambda q, k, v: attention(q, k, v, mask)[0].sum(), argnums=(0, 1, 2)))(q, k, v)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("hidden", [7.0, np.nan, np.inf])
@pytest.mark.parametrize("visible", [1.0, np.nan])
def test_hidden_slots_are_zeroed_where_a_result_is_not_finite(hidden, visible):
    """As programs for GPUs do with long lists of pairs, which a copy would write to memory."""
    pairs, seen = jnp.asarray([visible, 2.0, hidden]), jnp.asarray([True, True, False])
    attended = lambda pairs: (jnp.vdot(jnp.asarray([0.5, 0.5, 0.0]), pairs),)
    zeroed = lambda pairs: (attended(jnp.where(seen, pairs, 0))[0],)
    (found,) = jax.jit(functools.partial(xla._as_they_are, attended, zeroed))(pairs)
    np.testing.assert_array_equal(found, (visible + 2) / 2)
    (found,) = xla._as_they_are(attended, lambda _: (jnp.float32(-1),), pairs)
    assert (found == -1) == (not np.isfinite(hidden + visible)), "finite results are not computed again"


@pytest.mark.parametrize(
    ("platform", "queries", "slots", "branches"),
    [
        ("cuda", 4, 2**15, True),
        ("cuda", 65, 2**15, False),
        ("cuda", 4, 2**14, False),
        ("tpu", 4, 2**15, False),
    ],
)
def test_gpus_zero_long_lists_of_pairs_in_a_branch(platform, queries, slots, branches):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    pairs = of(1, slots, 8, 128)
    mask = jax.ShapeDtypeStruct((1, 1, 1, slots), jnp.bool_)
    for of_found, branch in ((lambda found: found, branches), (lambda found: found[1], False)):
        run = jax.jit(lambda *arrays, of_found=of_found: of_found(attention(*arrays)))
        program = run.trace(of(1, queries, 32, 128), pairs, pairs, mask)
        text = program.lower(lowering_platforms=(platform,)).as_text(debug_info=True)
        assert (f"/{xla.AGAIN}/" in text) == branch, "a log-sum-exp alone reads no values"


def test_as_many_queries_at_once_as_the_scores_have_room_for():
    # LLaDA-8B's full steps after prompts of 4096 and 1024, and its partial steps of two widths.
    assert queries_at_once(4352, 1, 32, 4352) == 32
    assert queries_at_once(1280, 1, 32, 1280) == 128
    assert queries_at_once(320, 1, 32, 1280) == 112
    assert queries_at_once(160, 1, 32, 1280) == 160
    assert queries_at_once(2**17, 1, 4, 64) == 2**15
    assert queries_at_once(100, 64, 64, 2**20) == 16
    shape = jax.eval_shape(attention, *(jax.ShapeDtypeStruct((1, 4352, 32, 8), jnp.float32),) * 3)
    assert [leaf.shape for leaf in shape] == [(1, 4352, 32, 8), (1, 32, 4352)]


@pytest.mark.parametrize(
    ("platform", "queries", "loops"),
    [("cpu", 1280, 1), ("tpu", 1280, 1), ("cuda", 1280, 0), ("cuda", 4352, 1), ("tpu", 160, 0)],
)
def test_gpus_have_room_for_more_queries_at_once(platform, queries, loops):
    q = jax.ShapeDtypeStruct((1, queries, 32, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, max(queries, 1280), 32, 128), jnp.bfloat16)
    program = run.trace(q, k, k).lower(lowering_platforms=(platform,)).as_text()
    assert program.count("stablehlo.while") == loops


def test_platforms_that_differ_in_their_room_leave_gradients_batching_and_export(monkeypatch):
    monkeypatch.setattr(xla, "SCORE_BYTES", 2**12)
    monkeypatch.setattr(xla, "SCORE_BYTES_ON_CUDA", 2**18)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 70, 4, 16)), jnp.float32) for _ in range(3))
    total = lambda q, chunk: jnp.sum(jnp.sin(attention(q, k, v, chunk=chunk)[0]))
    gradient = lambda chunk: jax.jit(jax.grad(functools.partial(total, chunk=chunk)))
    assert "platform_index" in str(gradient(None).trace(q).jaxpr)
    np.testing.assert_allclose(gradient(None)(q), gradient(70)(q), rtol=1e-5, atol=1e-5)

    at_once = attention(q, k, v, chunk=70)[0]
    batched = jax.jit(jax.vmap(lambda q: attention(q, k, v)[0]))(jnp.stack([q, -q]))
    np.testing.assert_allclose(batched[0], at_once, rtol=1e-5, atol=1e-6)
    program = jax.export.export(jax.jit(lambda q: attention(q, k, v)[0]), platforms=("cpu", "cuda", "tpu"))
    np.testing.assert_allclose(
        program(jax.ShapeDtypeStruct(q.shape, q.dtype)).call(q), at_once, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("batch", [3, TURNS + 4])
@pytest.mark.parametrize("mask", [None, (1, 1, S), (1, Q, S), (2, Q, S)])
def test_turns_of_sequences_and_heads_are_all_at_once(batch, mask):
    rng = np.random.default_rng(batch)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    arrays = [draw(batch, Q, 4, 8), draw(batch, S, 2, 8), draw(batch, S, 2, 8)]
    if mask:
        arrays.append(jnp.asarray(rng.random((batch, *mask)) < 0.6))
    for in_turn in (xla._few_in_turn, *(functools.partial(xla._heads_in_turn, heads=n) for n in (1, 2))):
        for ours, theirs in zip(jax.jit(in_turn)(*arrays), run(*arrays), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("batch", "slots", "heads", "at_once"), [
    (1, 1280, 32, 32), (8, 1280, 32, 32), (1, 8448, 32, 4), (2, 8448, 12, 6), (1, 33024, 8, 1),
])  # fmt: skip
def test_as_many_heads_take_turns_as_the_chip_holds_pairs_of(batch, slots, heads, at_once):
    of = lambda rows, count: jax.ShapeDtypeStruct((batch, rows, count, 128), jnp.bfloat16)
    assert xla._heads_at_once(of(slots, heads)) == at_once
    operands = of(1024, heads), *[of(slots, heads)] * 2

    def loops(platform: str) -> int:
        program = jax.jit(attention_by_sequence).trace(*operands).lower(lowering_platforms=(platform,))
        return program.as_text().count("stablehlo.while")

    # A loop of turns, around that of the chunks; the partitioner of a mesh would gather heads.
    assert loops("tpu") == 1 + (at_once < heads or batch > 1)
    with jax.set_mesh(jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert loops("tpu") == 1 + (batch > 1)


@pytest.mark.parametrize(("batch", "turns"), [(1, 0), (4, 3), (40, TURNS - 1)])
def test_batches_of_many_pairs_take_turns_on_tpus(batch, turns):
    k = jax.ShapeDtypeStruct((batch, 2048, 16, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((batch, 32, 16, 128), jnp.bfloat16)

    def barriers(function) -> dict[str, int]:
        lower = lambda platform: jax.jit(function).trace(q, k, k).lower(lowering_platforms=(platform,))
        return {p: lower(p).as_text().count("optimization_barrier") for p in ("tpu", "cuda", "cpu")}

    assert barriers(attention_by_sequence) == {"tpu": turns, "cuda": 0, "cpu": 0}
    assert barriers(attention) == {"tpu": 0, "cuda": 0, "cpu": 0}  # full passes, which meshes split


def test_one_product_adds_up_values_and_weights():
    rng = np.random.default_rng(3)
    weights, values = rng.random((2, 3, 2, 5, 7)), rng.standard_normal((2, 3, 7, 4))
    weights[0, 0, 0, 0] = 0  # a query that may attend to nothing
    both = [f(*(jnp.asarray(a, jnp.float32) for a in (weights, values))) for f in (in_one_product, products)]
    for one, two in zip(*both, strict=True):
        assert one.shape == two.shape
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both[0][0], np.einsum("bkgqs,bksd->bkgqd", weights, values), rtol=1e-5)


@pytest.mark.parametrize(
    ("platform", "queries", "columns"), [("tpu", 1280, 129), ("tpu", 32, 128), ("cuda", 1280, 128)]
)
def test_tpus_add_up_the_weights_of_many_queries_in_the_product_with_the_values(platform, queries, columns):
    q, k = (jax.ShapeDtypeStruct((1, n, 32, 128), jnp.bfloat16) for n in (queries, 1280))
    program = run.trace(q, k, k).lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 2
    assert [line for line in products if f"x{columns}xf32>" in line.split("->")[-1]], products
    assert ("x129x" in program) == (columns == 129)
