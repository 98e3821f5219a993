"""Layer budgets measured on the request: as many in all, and those of an offline profile of the request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm_jax as dj
from dllm_jax import eviction, policies
from tests.models import WIDE, families, generated, prompts, tiny

FIRST = eviction.BoundaryMiddle(first=1, last=0)  # of the tiny models' two layers
ONLINE = eviction.OnlineLayers(FIRST)


@settings(max_examples=40)
@given(
    st.sampled_from([3, 8]).flatmap(lambda n: st.lists(st.floats(0.0, 1.0), min_size=n, max_size=n)),
    st.integers(1, 60),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_budgets_add_up_and_stay_below_what_storage_and_heads_have_room_for(importance, budget, prompt, beta):
    n = len(importance)
    online = eviction.OnlineLayers(eviction.BoundaryMiddle(beta=beta))
    uniform = online.budgets(n, budget, prompt)
    measured = jnp.asarray([importance, importance[::-1]]).T
    lengths = jnp.asarray([prompt, prompt // 2])
    start = jnp.stack([uniform, uniform], axis=1)
    ours = online.of_request(start, lambda: measured, budget, lengths)
    total, room = np.asarray(ours.sum(axis=0)), n * np.minimum(budget, lengths)
    np.testing.assert_array_equal(total, room)
    assert (np.asarray(ours) >= 0).all()
    assert int(ours.max()) <= online.widest(uniform[None], budget, prompt)


def test_budgets_are_those_of_the_same_profile_known_before():
    importance = np.random.default_rng(0).uniform(0.05, 0.2, (32, 6)).astype(np.float32)
    lengths = np.array([400, 256, 255, 40, 1, 0])
    offline = [
        eviction.BoundaryMiddle(tuple(row.tolist())).budgets(32, 256, int(p))
        for row, p in zip(importance.T, lengths, strict=True)
    ]
    measure = lambda: jnp.asarray(importance)
    ours = eviction.OnlineLayers().of_request(jnp.zeros((32, 6), int), measure, 256, jnp.asarray(lengths))
    np.testing.assert_array_equal(ours.T, offline)


def with_budgets(layers, prompt_every=4, response_every=2) -> policies.MaskKV:
    return policies.MaskKV(prompt_every, response_every, budget=3, layers=layers)


@families("dream")
@pytest.mark.parametrize("row", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_row_decodes_as_with_its_own_offline_profile(row, family):
    model, length = tiny(family), (12, 7)[row]
    ours = generated(model, with_budgets(ONLINE), (12, 7))
    alone = prompts(model, (12, 7))[0][row : row + 1, -length:]
    profile = eviction.calibrate(model, alone, 8)
    known = with_budgets(dataclasses.replace(FIRST, importance=profile))
    offline = dj.generate(model, alone, length=8, block=4, policy=known, trace=True, widths=WIDE)
    np.testing.assert_array_equal(ours.trace.tokens[:, row, -length - 8 :], offline.trace.tokens[:, 0])
    np.testing.assert_array_equal(ours.trace.computed[:, row, -length - 8 :], offline.trace.computed[:, 0])
    assert len(set(dataclasses.replace(FIRST, importance=profile).budgets(2, 3, length))) == 2
    assert ours.stats.widened[row] == length + 8
    assert offline.stats.widened[0] == 0


@families("dream")
def test_the_exact_limit(family):
    ours = generated(family, with_budgets(ONLINE, 1, 1), (12, 7))
    exact = generated(family, lengths=(12, 7))
    np.testing.assert_array_equal(ours.trace.tokens, exact.trace.tokens)


def test_the_storage_is_that_of_uniform_budgets():
    spec, layout = tiny("dream").spec, dj.Layout(100, 8, 4, 8, padded=True)
    init = lambda layers: jax.eval_shape(
        functools.partial(policies.MaskKV(layers=layers).init, spec, layout, 2, jnp.bfloat16)
    )
    assert init(ONLINE)[:2] == init(eviction.UniformLayers())[:2]


def test_too_few_layers_are_refused():
    spec = tiny("llada").spec
    policy = policies.MaskKV(layers=eviction.OnlineLayers(eviction.BoundaryMiddle(first=9)))
    with pytest.raises(ValueError, match="first=9"):
        policy.init(spec, dj.Layout(8, 8, 4, 8), 1, jnp.float32)
