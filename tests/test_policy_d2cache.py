"""d2Cache's rollout and selection against plain numpy, and what a run of it must show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax.policies import D2Cache
from dllm_jax.policies import d2cache as method
from dllm_jax.state.rows import Rows, compact, full_rows
from dllm_jax.xla.products import few_rows_at_once
from tests.models import canvas, generated, spec

LENGTH = 11
few = settings(max_examples=25)
bits = lambda n: st.lists(st.booleans(), min_size=n, max_size=n).map(np.asarray)
coarse = lambda n: st.lists(st.integers(0, 5), min_size=n, max_size=n).map(
    lambda x: np.asarray(x, np.float32)
)


@jax.jit
def rolled_out(attention, rows_index, valid):
    rows = Rows(rows_index, LENGTH)
    c = method.identity_rows(rows)
    for a in attention:
        c = method.roll(c, a, rows, valid)
    return method.column_sums(c, rows, valid)


def plain_rollout(attention: np.ndarray, selected: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The explicit product of l x l matrices, float64, one sequence; attention is [n l l]."""
    c = np.eye(len(valid))
    for a in attention.astype(np.float64):
        e = np.where((selected & valid)[:, None], a, np.eye(len(valid)))
        w = e + np.eye(len(valid))
        c = (w / w.sum(1, keepdims=True)) @ c
    return np.where(valid, c[valid].sum(0), 0.0)


def random_attention(rng, layers: int, valid: np.ndarray) -> np.ndarray:
    weights = np.exp(3 * rng.standard_normal((layers, len(valid), len(valid)))) * valid
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


@few
@given(st.integers(0, 1000), bits(LENGTH), st.integers(0, 3), st.sampled_from([LENGTH, 8]))
def test_rollout_is_the_product_of_the_layers(seed, selected, pads, width):
    selected &= np.cumsum(selected) <= width
    valid = np.arange(LENGTH) >= pads
    attention = random_attention(np.random.default_rng(seed), 4, valid)
    index = compact(jnp.asarray(selected)[None], width)
    computed = attention[:, np.minimum(np.asarray(index[0]), LENGTH - 1)]  # padding holds anything
    ours = rolled_out(jnp.asarray(computed)[:, None], index, jnp.asarray(valid)[None])[0]
    np.testing.assert_allclose(ours, plain_rollout(attention, selected, valid), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.sum(), valid.sum(), rtol=1e-5)


def test_rollout_of_a_whole_step_with_a_frozen_row_and_poisoned_padding():
    valid = np.arange(LENGTH)[None] >= np.asarray([[3], [0]])
    attention = np.stack([random_attention(np.random.default_rng(i), 3, v) for i, v in enumerate(valid)], 1)
    poisoned = attention.copy()
    poisoned[:, 0, :3] = np.nan
    rows = full_rows(jnp.asarray([[True] * LENGTH, [False] * LENGTH]))
    c = method.identity_rows(rows)
    for a in poisoned:
        c = method.roll(c, jnp.asarray(a), rows, jnp.asarray(valid))
    ours = method.column_sums(c, rows, jnp.asarray(valid))
    everything = np.ones(LENGTH, bool)
    np.testing.assert_allclose(ours[0], plain_rollout(attention[:, 0], everything, valid[0]), rtol=1e-5)
    np.testing.assert_allclose(ours[1], 1.0)


def test_rows_of_the_rollout_in_turn_are_the_product():
    """TPUs compute it in parts, of which the last one is filled up."""
    rng = np.random.default_rng(0)
    attention, c = (rng.random(shape, np.float32) for shape in ((2, 300, 20), (2, 20, 30)))
    times = lambda rows, c: jnp.einsum("bqr,brl->bql", rows, c)
    in_turn = jax.jit(lambda rows, c: few_rows_at_once(times, rows, c))
    ours = in_turn(jnp.asarray(attention), jnp.asarray(c))
    np.testing.assert_allclose(ours, np.einsum("bqr,brl->bql", attention, c), rtol=1e-5)


@few
@given(coarse(9), bits(9), st.sampled_from([0.0, 0.1234, 0.37, 0.613, 1.0]))
def test_nucleus(weight, among, p):
    ours = jax.jit(method.nucleus, static_argnums=2)(jnp.asarray(weight)[None], jnp.asarray(among)[None], p)
    total, expected = 0.0, []
    for i in sorted(np.flatnonzero(among), key=lambda i: (-weight[i], i)):
        total += float(weight[i]) / (float(weight[among].sum()) + 1e-9)
        beyond = total > p + 1e-6 and p < 1
        expected += [] if beyond and expected else [i]
        if beyond:
            break
    assert np.flatnonzero(ours[0]).tolist() == sorted(expected)


def plain_candidates(score, masked, prompt: int, block: int, current: int, k: int) -> set[int]:
    """M*, by the words of the specification; `current` is the first position of the current block."""
    masks = np.flatnonzero(masked)
    if not len(masks):
        return set()
    e = masks[min(k, len(masks)) - 1] - prompt
    end = prompt + (e // block + 1) * block
    reachable = [i for i in masks if i < max(end, current + block)]
    return set(sorted(reachable, key=lambda i: (i >= current + block, -score[i], i))[:k])


@few
@given(coarse(12), bits(12), st.integers(1, 9), st.sampled_from([3, 4, 12]), st.integers(0, 3))
def test_candidates_and_search_range(score, masked, k, block, current):
    prompt, start = 2, min(current * block, 12 - block)
    masked[:start] = False  # blocks before the current one are done
    if not masked[start : start + block].any():
        masked[start] = True
    full = np.concatenate([np.zeros(prompt, bool), masked])
    c = canvas(full[None], prompt, block, block_start=jnp.asarray(prompt + start))
    score = np.concatenate([np.zeros(prompt, np.float32), score])
    ours = jax.jit(method.expected_masks, static_argnums=2)(jnp.asarray(score)[None], c, k)
    assert set(np.flatnonzero(ours[0])) == plain_candidates(score, full, prompt, block, prompt + start, k)


def test_the_search_ends_with_a_block_that_begins_in_the_prompt():
    """On SDAR, blocks of 2 after a prompt of 1 are 0-1, 2-3, ..: the second mask lies in the second one."""
    c = canvas(np.arange(9)[None] > 0, prompt=1, block=2, family="sdar")
    chosen = jax.jit(method.expected_masks, static_argnums=2)(jnp.arange(9.0)[None] % 4, c, 2)
    assert np.flatnonzero(chosen[0]).tolist() == [1, 3]


def test_a_prior_below_zero_prefers_known_neighbors_too():
    c = canvas(np.asarray([[False, True, True, True, True, True, True, True]]), prompt=1)
    prior = jax.jit(lambda confidence: method.prior(confidence, c, 1.0))
    for confidence in (0.5, -0.5):
        score = np.asarray(prior(np.full((1, 8), confidence, np.float32)))[0, 1:]
        assert (np.diff(score[:4]) < 0).all()
    assert np.max(prior(np.full((1, 8), -np.inf, np.float32))) == -np.inf


@pytest.mark.exhaustive
def test_the_rollout_can_stop_after_the_first_layers():
    every, first = (
        generated(policy=D2Cache(2, p=0.5, rollout_layers=layers), block=8).trace for layers in (None, 1)
    )
    assert (first.computed[1] != every.computed[1]).any()
    with pytest.raises(ValueError, match="rollout_layers=3, but the model has 2 layers"):
        D2Cache(rollout_layers=3).init(spec("llada"), dj.Layout(4, 8, 4, 8), 1, jnp.float32)
