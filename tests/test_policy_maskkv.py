"""MaskKV and the arithmetic of eviction, against plain numpy and in its limits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax import eviction, policies
from dllm_jax.eviction.heads import round_to_total
from dllm_jax.testing.runs import assert_close_scores, assert_same_run
from tests import refuses
from tests.models import canvas, generated, prompts, tiny


@settings(max_examples=25)
@given(
    st.sampled_from([1, 3, 8])  # few sizes, as each is a program
    .flatmap(lambda n: st.lists(st.just(0.0) | st.floats(0.01, 10), min_size=n, max_size=n))
    .filter(any),
    st.integers(0, 40),
    st.integers(1, 12),
    st.booleans(),
)
def test_rounded_budgets_add_up_below_the_cap(weights, total, cap, on_device):
    target = np.asarray(weights) / sum(weights) * total
    ours = np.asarray((jax.jit(round_to_total) if on_device else round_to_total)(target, total, cap))
    assert ours.sum() == min(total, cap * len(weights))
    assert (ours >= 0).all()
    assert (ours <= cap).all()
    if target.max() <= cap:
        assert (np.abs(ours - target) < 1 + 1e-4).all()


def test_water_filling_by_hand():
    np.testing.assert_array_equal(round_to_total(np.array([6.0, 3.0, 3.0]), 12, 4), [4, 4, 4])
    np.testing.assert_array_equal(round_to_total(np.array([9.0, 2.0, 1.0]), 12, 5), [5, 5, 2])
    np.testing.assert_array_equal(round_to_total(np.array([1.5, 1.5, 1.0]), 4, 5), [2, 1, 1])


def test_boundary_layers_by_hand():
    layers = eviction.BoundaryMiddle((3.0, 1.0, 1.0, 1.0), beta=0.5)
    # base 4 of 8; 16 to spread: boundary 16 * 4/6 = 10.67 over two, middle 5.33 over two
    np.testing.assert_array_equal(layers.budgets(4, 8, 100), [9, 7, 7, 9])
    np.testing.assert_array_equal(layers.budgets(4, 8, 5), [5, 5, 5, 5])
    np.testing.assert_array_equal(eviction.BoundaryMiddle().budgets(4, 8, 100), [8, 8, 8, 8])
    # base 2 of 8; 24 to spread: boundary 24 * 4/6 = 16 over two, middle 8 over two
    layers = eviction.BoundaryMiddle((3.0, 1.0, 1.0, 1.0), beta=0.25)
    np.testing.assert_array_equal(layers.budgets(4, 8, 100), [10, 6, 6, 10])


def test_heads_compete_by_their_votes_and_ties_go_to_the_lower_head():
    votes = np.float32([[[5.0, 4.0, 3.0, 0.0], [3.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
    evidence = eviction.Evidence(votes, np.ones((1, 3), np.float32))
    given = evidence, np.asarray([2]), np.asarray([4])
    budgets = lambda floor: jax.jit(eviction.AdaKV(floor).budgets)(*given)
    np.testing.assert_array_equal(budgets(0.0), [[3, 3, 0]])
    np.testing.assert_array_equal(budgets(0.5), [[3, 2, 1]])
    np.testing.assert_array_equal(budgets(1.0), [[2, 2, 2]])


def test_quarters_of_the_masked_rows_are_contiguous_longer_first():
    masked = np.zeros((1, 14), bool)
    masked[0, 3:14] = True
    masked[0, 5] = False
    state = canvas(masked, prompt=3)
    split = np.array_split(np.flatnonzero(masked[0]), 4)
    for quarter in range(4):
        ours = np.flatnonzero(eviction.PositionVotes(quarter).voters(state)[0])
        np.testing.assert_array_equal(ours, split[quarter])


def test_masks_vote_or_the_positions_that_predict_them():
    state = canvas(np.arange(8)[None] >= 5, prompt=5, family="dream")
    voters = lambda policy: np.flatnonzero(policy.votes.voters(state)[0]).tolist()
    assert (voters(policies.MaskKV()), voters(policies.EvictPrompt())) == ([5, 6, 7], [4, 5, 6])


def test_three_means_of_layers():
    squeeze = eviction.SqueezeAttention((0.5, 0.52, 0.9, 0.7, 0.91))
    np.testing.assert_array_equal(squeeze.groups(), [0, 0, 2, 1, 2])
    assert squeeze.budgets(5, 10, 100).sum() == 50


def test_a_full_budget_is_dllm_cache():
    intervals = dict(prompt_every=4, response_every=2)
    ours = generated(policy=policies.MaskKV(budget=12, **intervals), lengths=(12, 7))
    cache = generated(policy=policies.DLLMCache(**intervals), lengths=(12, 7))
    assert_same_run(ours.trace, cache.trace, computed=True)
    assert_close_scores(ours.trace, cache.trace, atol=1e-5)


def test_the_storage_holds_the_budget_and_no_more():
    spec, layout = tiny("dream").spec, dj.Layout(prompt=100, response=8, block=4, steps=8)
    cache = policies.MaskKV(budget=10).init(spec, layout, 2, jnp.bfloat16)
    assert cache.shared.k.shape == (2, 10 * spec.layers * spec.kv_heads, spec.head_dim)
    assert cache.layers.k.shape == (spec.layers, 2, 8, spec.kv_heads, spec.head_dim)
    full = policies.DLLMCache().init(spec, layout, 2, jnp.bfloat16)
    size = lambda c: sum(a.nbytes for a in jax.tree.leaves((c.layers.k, c.layers.v)))
    kept = cache.shared.k.nbytes + cache.shared.v.nbytes
    assert size(cache) + kept == size(full) * (8 + 10) // 108


def test_a_profile_survives_saving(tmp_path):
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5))
    profile = eviction.calibrate(model, prompt, 8, prompt_mask=mask)
    assert len(profile) == model.spec.layers
    assert min(profile) > 0
    eviction.save_profile(tmp_path / "profile.json", profile, prompts=2)
    assert eviction.load_profile(tmp_path / "profile.json") == profile
    for content in ("{", "[]", "{}", '{"importance": []}', '{"importance": ["x"]}', '{"a":' + "[" * 100_000):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match=r"other\.json is no profile as save_profile writes it"):
            eviction.load_profile(tmp_path / "other.json")
    refuses(
        "profile=.* must be values, one per layer, each a finite", eviction.save_profile, "x", (1.0, np.nan)
    )
    damaged = dj.Model({**model.params, "embed": model.params["embed"] * np.nan}, model.spec)
    refuses("layer 0 has importance nan: the model computes NaN", eviction.calibrate, damaged, prompt, 8)
    alone = [eviction.calibrate(model, prompt[i : i + 1, -n:], 8) for i, n in enumerate((9, 5))]
    np.testing.assert_allclose(profile, np.mean(alone, axis=0), atol=1e-6)
    policies.MaskKV(layers=dataclasses.replace(eviction.BoundaryMiddle(), importance=profile))
