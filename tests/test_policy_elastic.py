"""Elastic-Cache: the drift test, the window, the stop token, and the limits of its refreshes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.policies.elastic import most_attended
from dllm_jax.state.canvas import behind_first_eos
from dllm_jax.testing.runs import assert_close_scores, assert_same_run
from tests.models import canvas, families, generated, members, prompts, spec, tiny


def two_attentions(seed=0, shape=(2, 4, 3, 7)):
    """Attention weights [b h t s] before and after, and keys of which the second sequence lacks two."""
    rng = np.random.default_rng(seed)
    old, new = rng.random((2, *shape)).astype(np.float32)
    keys = np.ones((shape[0], shape[-1]), bool)
    keys[1, :2] = False
    old, new = (np.where(keys[:, None, None], a, 0) for a in (old, new))
    old, new = (a / a.sum(-1, keepdims=True) for a in (old, new))
    return jnp.asarray(old), jnp.asarray(new), jnp.asarray(keys)


def cosine(x, y):
    return x @ y / (np.linalg.norm(x) * np.linalg.norm(y))


def test_drift_is_the_cosine_over_heads_for_each_key_or_of_mean_attention_vectors():
    old, new, keys = two_attentions()
    tested = jnp.asarray([[True, True, False], [False, True, False]])
    by_head = policies.HeadCosine().similarity(old, new, tested, keys)
    by_key = policies.KeyCosine().similarity(old, new, tested, keys)
    for i in range(2):
        at, seen = np.flatnonzero(tested[i]), np.flatnonzero(keys[i])
        of_heads = [cosine(old[i, :, t, s], new[i, :, t, s]) for t in at for s in seen]
        np.testing.assert_allclose(by_head[i], np.mean(of_heads), rtol=1e-5)
        of_keys = [cosine(old[i, :, t].mean(0), new[i, :, t].mean(0)) for t in at]
        np.testing.assert_allclose(by_key[i], np.mean(of_keys), rtol=1e-5)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=6, max_size=6), st.sampled_from([1, 3, 9])
)
def test_most_attended_are_the_best_candidates_lowest_first(drawn, track):
    votes = np.array([v for v, _ in drawn], np.float32)
    candidates = [i for i, (_, may) in enumerate(drawn) if may]
    expected = sorted(candidates, key=lambda i: (-votes[i], i))[:track]
    may = jnp.asarray([may for _, may in drawn])
    ours = most_attended(jnp.asarray(votes)[None], may[None], track)[0]
    assert [i for i in np.asarray(ours).tolist() if i < 6] == expected


def test_the_window_is_the_leftmost_masks_of_the_block():
    masked = np.zeros((2, 12), bool)
    masked[0, [4, 6, 7, 9, 11]] = masked[1, [10, 11]] = True
    policy = policies.ElasticCache(window=3)
    assert members(policy.eligible(canvas(masked, prompt=4))) == [[4, 6, 7], [10, 11]]
    assert members(policy.eligible(canvas(masked, prompt=4, block=4))) == [[4, 6, 7], []]
    still = canvas(masked, prompt=4, active=jnp.asarray([False, True]))
    assert members(policy.eligible(still)) == [[], [10, 11]]


def test_positions_behind_the_first_committed_stop_token_are_given_up():
    eos = spec("llada").eos_id
    masked = np.zeros((1, 10), bool)
    masked[0, [5, 7, 9]] = True
    now = canvas(masked, prompt=2)
    tokens = now.tokens.at[0, jnp.asarray([0, 4, 6, 8])].set(eos)  # 0: in the prompt; 4: decoded later
    decoded_at = jnp.full((1, 10), -1).at[0, jnp.asarray([3, 4, 6, 8])].set(jnp.asarray([0, 2, 1, 1]))
    now = type(now)(**{**now.__dict__, "tokens": tokens, "decoded_at": decoded_at})
    assert members(behind_first_eos(now)) == [[7, 8, 9]]
    assert members(policies.ElasticCache(cut_at_eos=True).undecided(now)) == [[5]]
    assert members(policies.ElasticCache().undecided(now)) == [[5, 7, 9]]
    nothing = type(now)(**{**now.__dict__, "decoded_at": jnp.full((1, 10), -1)})
    assert members(behind_first_eos(nothing)) == [[]]


def test_tracking_the_whole_canvas_is_exact_also_behind_a_stop():
    first = np.asarray(generated(policy=policies.Policy(), block=8).tokens)
    stops = [[int(first[0, -6])], [int(first[1, -5])]]  # masks stand behind them when they are found
    ours, exact = (
        generated(policy=policy, block=8, stop=stops).trace
        for policy in (policies.ElasticCache(window=8, track=17), policies.Policy())
    )
    assert (np.asarray(exact.tokens)[len(ours.tokens) - 2] == tiny("llada").spec.mask_id).any()
    assert_same_run(ours, exact)
    assert_close_scores(ours, exact, atol=2e-6)


@families("llada")
def test_widened_counts_the_layers_that_a_refresh_recomputed(family):
    """Above 1 every step after the first refreshes from layer 1 on: half of a two-layer model."""
    always, never = (
        generated(family, policies.ElasticCache(4, gamma), sampler=samplers.Threshold(0.25), block=8)
        for gamma in (1.5, -1.0)
    )
    _, mask = prompts(tiny(family), (9, 6))
    besides = (~np.asarray(always.trace.computed) & np.pad(mask, ((0, 0), (0, 8)), constant_values=True)) / 2
    took_part = np.asarray(always.trace.active)[..., None]
    np.testing.assert_allclose(always.stats.widened_tokens, (besides * took_part).sum((0, 2)))
    np.testing.assert_array_equal(always.trace.widened[0], True)
    np.testing.assert_array_equal(always.trace.widened[1:], took_part[1:] & [False, True])
    np.testing.assert_array_equal(never.stats.widened_tokens, 0)
    np.testing.assert_array_equal(never.trace.widened[1:], False)


@pytest.mark.exhaustive
def test_widened_counts_the_conditional_stream_alone():
    """With guidance each sequence has two streams, side by side, whose drift differs."""
    model = tiny("dream")
    prompt, _ = prompts(model)
    sampler = samplers.Confidence(cfg_scale=1.5)
    policy = policies.ElasticCache(window=2, gamma=0.97)
    options = dict(length=8, policy=policy, sampler=sampler)
    widened = dj.generate(model, prompt, **options).stats.widened_tokens
    alone = [dj.generate(model, prompt[i : i + 1], **options).stats.widened_tokens[0] for i in range(2)]
    assert len({float(one) for one in alone}) > 1, "the sequences must differ"
    np.testing.assert_array_equal(widened, alone)
