"""Suffix dropout: its sets, its limit, and what it may go over; DPad's traces are replayed (test_goldens)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.policies import GaussianDropout, NearAndLast, SuffixDropout, UniformDropout
from dllm_jax.testing.runs import assert_same_run, finite
from tests.models import canvas, families, generated
from tests.policy_cases import short

OPTIONS = dict(length=16, block=4)
UNDER = (
    policies.Policy(), policies.PrefixCache(), policies.DualCache(), policies.DKVDecode(refresh_every=3),
)  # fmt: skip
LAYOUT = dj.Layout(prompt=4, response=400, block=8, steps=400)


@families("dream")
@pytest.mark.parametrize(
    "under",
    [
        pytest.param(u, marks=pytest.mark.exhaustive if i % 2 else (), id=short(u))
        for i, u in enumerate(UNDER)
    ],
)
def test_a_set_that_keeps_everything_is_the_policy_alone(under, family):
    alone, whole, few = (
        generated(family, policy, **OPTIONS).trace
        for policy in (under, *(SuffixDropout(under, NearAndLast(near, 1)) for near in (12, 1)))
    )
    assert_same_run(whole, alone, computed=True)
    np.testing.assert_allclose(finite(whole.score), finite(alone.score), atol=1e-5)
    apart = np.abs(finite(few.score)[:4] - finite(alone.score)[:4]).max()
    assert apart > 1e-3, "a set that drops nothing would pass too"


@pytest.mark.parametrize(
    "under", [policies.DualCache(), policies.WindowDiffusion(window=5, active=2, refresh_every=6)], ids=short
)
@pytest.mark.parametrize("keep", [GaussianDropout(window=9, sigma=2.0), NearAndLast(2, 2)], ids=short)
def test_nothing_is_read_that_no_step_has_computed(under, keep):
    """A block keeps others than the one before it, which its first step computes."""
    trace = generated(policy=SuffixDropout(under, keep), **OPTIONS).trace
    computed = np.maximum.accumulate(np.asarray(trace.computed), axis=0)
    assert not (np.asarray(trace.read) & ~computed).any()
    assert not computed[0].all()


def at_block(number: int):
    """A canvas of two sequences at the beginning of a block, and the distances from its end."""
    masked = np.arange(LAYOUT.length) >= np.full((2, 1), LAYOUT.prompt)
    c = canvas(masked, LAYOUT.prompt, LAYOUT.block, LAYOUT.response)
    c = c.at_block(c.block_start + LAYOUT.block * number)
    return c, c.position - c.block_end


def test_the_draws_of_a_gaussian_have_its_probabilities():
    """Of 0.4 scale at the block's end, as the formula says behind it, and of none behind the window."""
    keep = GaussianDropout(window=60, sigma=3.0, scale=1.5)
    drawn, (c, distance) = np.zeros(LAYOUT.response), at_block(0)
    for seed in range(400):
        kept = np.asarray(dataclasses.replace(keep, seed=seed).kept(c, distance))[0]
        drawn[:392] += kept[4 + 8 :]
    x = 3.0 * np.arange(60) / 59
    expected = np.minimum(1.5 * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), 1)
    assert np.abs(drawn[:60] / 400 - expected).max() < 0.1  # four standard deviations of 400 draws
    assert not drawn[60:].any()
    assert abs(drawn.sum() / 400 - expected.sum()) < 1
    assert keep.size(LAYOUT) == pytest.approx(
        expected.sum() + 3 * np.sqrt((expected * (1 - expected)).sum()), abs=1
    )
    always = GaussianDropout(window=60, sigma=0.0, scale=3.0)
    np.testing.assert_array_equal(always.kept(c, distance)[0, 12:72], True)


def test_each_block_draws_anew_and_all_of_its_steps_alike():
    keep = UniformDropout(window=100, number=10)
    (first, at_first), (second, at_second) = at_block(0), at_block(1)
    later = dataclasses.replace(first, block_step=first.block_step + 3, step=first.step + 3)
    one, other = keep.kept(first, at_first), keep.kept(second, at_second)
    np.testing.assert_array_equal(one, keep.kept(later, at_first))
    assert one.sum(axis=1).tolist() == other.sum(axis=1).tolist() == [10] * len(one)
    assert jnp.flatnonzero(one[0]).max() < 12 + 100
    places = [np.asarray(set_[0, start : start + 100]) for set_, start in ((one, 12), (other, 20))]
    assert (places[0] != places[1]).any()
    seeded = dataclasses.replace(keep, seed=1)
    assert (seeded.kept(first, at_first) != one).any()


def test_near_and_last():
    c, distance = at_block(2)
    kept = np.flatnonzero(NearAndLast(near=3, last=2).kept(c, distance)[0] & (distance[0] >= 0))
    assert kept.tolist() == [28, 29, 30, 402, 403]


def test_given_text_behind_the_block_stays():
    model = dj.testing.tiny("llada")
    template = np.arange(3, 27)[None]
    template[0, [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22]] = model.spec.mask_id
    policy = SuffixDropout(policies.DualCache(), NearAndLast(0, 0))
    trace = dj.infill(model, template, block=8, policy=policy, trace=True).trace
    given = template[0] != model.spec.mask_id
    np.testing.assert_array_equal(trace.read[0, 0], given | (np.arange(24) < 8))
