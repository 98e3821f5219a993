"""Sparse-dLLM: what is kept, when it is chosen, what is stored; neighbor limits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.nn.layer import Layer
from dllm_jax.nn.rope import rope_table
from dllm_jax.policies import DualCache, Policy, SparseDLLM
from dllm_jax.samplers import Confidence
from dllm_jax.state.cache import LayerCache, Stacked
from dllm_jax.state.rows import Rows, full_rows
from dllm_jax.testing import check_policy, checks
from dllm_jax.testing.runs import assert_close_scores, assert_same_run
from tests.kernel_cases import some
from tests.models import canvas, families, generated, spec, tiny

SIDES = ("both", "prefix")
PROMPT, RESPONSE, BLOCK = 7, 12, 4
LENGTH = PROMPT + RESPONSE


def state(family="llada", pads=(0, 0), start=PROMPT + BLOCK, block_step=1, **changes):
    """A batch of two whose second block begins."""
    valid = np.arange(LENGTH) >= np.asarray(pads)[:, None]
    masked = np.broadcast_to(np.arange(LENGTH) >= start, valid.shape)
    changes = {"block_step": jnp.full(2, block_step), "block_start": jnp.int32(start), **changes}
    return canvas(masked, prompt=PROMPT, block=BLOCK, family=family, valid=valid, **changes)


def queries_and_keys(family="llada", seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda heads: jnp.asarray(rng.standard_normal((2, LENGTH, heads, 8)), jnp.float32)
    return draw(spec(family).heads), draw(spec(family).kv_heads)


@functools.partial(jax.jit, static_argnums=0)
def kept_by(policy, q, k, c):
    """The positions that a layer stores, as a set."""
    layer = Layer({}, c.spec, rope_table(LENGTH, 8, c.spec.rope_base), 0)
    return Rows(policy.retained(layer, q, k, c, LENGTH)[:, 0], LENGTH).mask()


def expected_kept(policy, q, k, start, pad, shifted) -> set[int]:
    """One sequence in plain numpy, positions as lists."""
    recomputed = range(start - shifted, start + BLOCK - shifted)
    always = {start + BLOCK - 1} if shifted else set()
    if policy.side == "prefix":
        always |= set(range(start + BLOCK, LENGTH))
    rest = [p for p in range(pad, LENGTH) if p not in recomputed and p not in always]
    mean = q[start : start + BLOCK].mean(axis=0)
    repeated = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    score = np.einsum("hd,shd->sh", mean, repeated).mean(axis=1)[rest]
    half = policy.kernel // 2
    pooled = [score[max(0, i - half) : i + half + 1].max() for i in range(len(rest))]
    order = sorted(range(len(rest)), key=lambda i: (-pooled[i], i))
    return always | {rest[i] for i in order[: int(len(rest) * policy.keep)]}


@families("dream")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("keep", "kernel"), [(0.5, 3), (0.3, 1), (0.7, 5), (0.0, 3), (1.0, 3)])
def test_kept_pairs_are_those_of_plain_numpy(keep, kernel, side, family):
    policy = SparseDLLM(keep=keep, kernel=kernel, side=side)
    q, k = queries_and_keys(family)
    for start in range(PROMPT, LENGTH, BLOCK):
        kept = np.asarray(kept_by(policy, q, k, state(family, pads=(0, 3), start=start)))
        for sequence, pad in enumerate((0, 3)):
            want = expected_kept(
                policy, np.asarray(q[sequence]), np.asarray(k[sequence]), start, pad, family == "dream"
            )
            assert set(np.flatnonzero(kept[sequence]).tolist()) == want


def test_the_cache_has_room_for_the_kept_pairs_and_the_block_only():
    layout = dj.Layout(PROMPT, RESPONSE, BLOCK, RESPONSE)
    for family, options, slots in (
        ("llada", {}, 7),  # 15 candidates
        ("llada", {"keep": 0.3}, 4), ("llada", {"keep": 1.0}, 15), ("llada", {"keep": 0.0}, 0),
        ("llada", {"side": "prefix"}, 3 + 8), ("dream", {}, 7 + 1), ("dream", {"side": "prefix"}, 3 + 8 + 1),
    ):  # fmt: skip
        cache = SparseDLLM(**options).init(spec(family), layout, 2, jnp.bfloat16)
        shape = (2, 2, slots + BLOCK, spec(family).kv_heads, 8)
        assert [(a.shape, a.dtype) for a in jax.tree.leaves(cache.layers)] == [(shape, jnp.bfloat16)] * 2
        assert cache.shared.shape == (2, layout.length)  # the retained positions


@jax.jit
def counted(policy, c):
    """How many positions may be chosen, are always stored, and are recomputed."""
    return [sets.sum() for sets in (policy.evictable(c), policy.always_stored(c), policy.recomputed(c))]


@families("dream")
@pytest.mark.parametrize("side", SIDES)
def test_kept_pairs_always_fit(side, family):
    """Also where a template has no prompt and padding reaches into its first blocks."""
    sides = SparseDLLM(side=side)  # which sets there are is a matter of the side, how many are kept of `keep`
    for prompt, pad in [(PROMPT, 0), (PROMPT, 6), (3, 2), (0, 0), (0, 1), (0, 4), (0, 6)]:
        length = prompt + RESPONSE
        valid = np.arange(length)[None] >= pad
        c = canvas(~valid, prompt=prompt, block=BLOCK, family=family, valid=valid)
        for start in range(prompt, length, BLOCK):
            c = c.at_block(jnp.full(1, start, jnp.int32))
            candidates, always, recomputed = map(int, counted(sides, c))
            assert recomputed <= BLOCK
            for keep in (0.1, 0.5, 0.9, 1.0):
                policy = SparseDLLM(keep=keep, side=side)
                made = jax.eval_shape(lambda p=policy, c=c: p.init(c.spec, c.layout, 1, jnp.float32))
                assert int(candidates * keep) + always <= made.layers.k.shape[2] - BLOCK


def filled(policy, c, family="llada"):
    """One layer in full over a store that holds -1: its keys and values, and the store afterwards."""
    model = tiny(family)
    rows = full_rows(c.everything & c.active[:, None])
    made = policy.init(model.spec, c.layout, 2, jnp.float32)
    store = jax.tree.map(lambda a: a - 1, made.layers)

    @jax.jit
    def written(weights, x):
        layer = Layer(weights, model.spec, rope_table(LENGTH, 8, model.spec.rope_base), jnp.int32(1))
        _, cache = policy.layer(layer, x, LayerCache(Stacked(store, jnp.int32(1)), made.shared), rows, c)
        return (*layer.qk(x, rows.index), layer.value(x)), cache.storage.layers

    x = np.random.default_rng(1).standard_normal((2, LENGTH, model.spec.width), np.float32)
    return written(jax.tree.map(lambda a: a[1], model.params["layers"]), x)


@families("dream")
@pytest.mark.parametrize("side", SIDES)
def test_the_cache_holds_the_kept_pairs_in_order(side, family):
    policy, c = SparseDLLM(keep=0.4, side=side), state(family, pads=(0, 3))
    (q, k, v), store = filled(policy, c, family)
    kept, k, v, of_k, of_v = map(np.asarray, (kept_by(policy, q, k, c), k, v, store.k, store.v))
    for sequence in range(2):
        position = np.flatnonzero(kept[sequence])
        np.testing.assert_array_equal(of_k[1, sequence, : len(position)], k[sequence, position])
        np.testing.assert_array_equal(of_v[1, sequence, : len(position)], v[sequence, position])
    assert (of_k[0] == -1).all(), "another layer was written"


def test_only_rows_whose_step_it_is_write():
    c = state(active=jnp.asarray([True, False]))
    _, store = filled(SparseDLLM(), c)
    assert (np.asarray(store.k[1, 0]) != -1).all()
    assert (np.asarray(store.k[1, 1]) == -1).all()
    for step in (0, 2):
        _, store = filled(SparseDLLM(), state(block_step=step))
        assert (np.asarray(store.k) == -1).all()


@families("dream")
@pytest.mark.parametrize("side", SIDES)
def test_keeping_everything_without_delay_is_dual_cache(side, family):
    ours, dual = (
        generated(family, policy, (9, 4), length=12).trace
        for policy in (SparseDLLM(keep=1.0, delay=0, side=side), DualCache())
    )
    assert_same_run(ours, dual, computed=True)
    assert_close_scores(ours, dual, atol=1e-5)


def test_a_shorter_last_block_leaves_more_to_keep():
    few = dict(length=10, block=4, sampler=Confidence(schedule="rounded"))
    ours, dual = (generated("llada", p, (9, 4), **few).trace for p in (SparseDLLM(1.0, delay=0), DualCache()))
    assert_same_run(ours, dual, computed=True)
    assert_close_scores(ours, dual, atol=1e-5)


@families("dream")
def test_a_delay_as_long_as_the_block_is_exact(family):
    assert_same_run(generated(family, SparseDLLM(delay=3)).trace, generated(family, Policy()).trace)


@families("dream")
@pytest.mark.parametrize(
    ("keep", "side"), some([(keep, side) for side in ("prefix", "both") for keep in (0.3, 0.0, 1.0)], 1)
)
def test_a_sequence_of_a_batch_equals_it_alone_at_other_settings(keep, side, family):
    policy = SparseDLLM(keep=keep, side=side, delay=0)
    check_policy(policy, families=(family,), checks=(checks.alone_as_in_a_batch,))
