"""Preference and policy-gradient objectives against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.training import (
    Batch,
    dpo_loss,
    elbo_masks,
    group_advantages,
    grpo_loss,
    response_log_probs,
    vrpo_loss,
)
from tests.models import random_tokens, tiny

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

RNG = np.random.default_rng(0)
ONE, TWO, THREE, FOUR = RNG.normal(size=(4, 6)).astype(np.float32)
TOKENS = RNG.normal(-1, 0.3, size=(3, 6, 5)).astype(np.float32)  # log_prob, old, reference


def test_dpo_is_the_formula():
    loss, metrics = dpo_loss(ONE, TWO, THREE, FOUR, beta=0.3)
    margin = 0.3 * ((ONE - THREE) - (TWO - FOUR)).astype(np.float64)
    np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp(-margin))), rtol=1e-5)
    np.testing.assert_allclose(metrics.margin, margin.mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics.accuracy, np.mean(margin > 0))


def test_dpo_pulls_the_pair_apart_and_leaves_the_reference_alone():
    gradient = jax.grad(lambda *args: dpo_loss(*args)[0], argnums=(0, 1, 2, 3))(ONE, TWO, THREE, FOUR)
    assert (gradient[0] < 0).all()
    np.testing.assert_allclose(gradient[1], -gradient[0], rtol=1e-6)
    assert not np.any(gradient[2:])


def test_vrpo_begins_at_log_two_and_learns_from_its_gradient():
    """Shared masks: where policy and reference are one model, every margin is exactly 0."""
    model = tiny("llada")
    prompt = random_tokens(model.spec, 4, 5)
    chosen, rejected = (Batch(prompt, random_tokens(model.spec, 4, n, seed=n)) for n in (3, 4))
    value = jax.jit(
        jax.value_and_grad(
            lambda model, reference: vrpo_loss(
                model, reference, chosen, rejected, jax.random.key(0), draws=4, beta=0.5
            ),
            has_aux=True,
        )
    )
    (loss, metrics), gradient = value(model, model)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    assert metrics.margin == 0
    step = lambda p, g: p - 2e-3 * g / jnp.maximum(jnp.sqrt(jnp.mean(g**2)), 1e-6)
    moved = jax.tree.map(step, model, gradient)
    (after, metrics), _ = value(moved, model)
    assert after < loss - 0.01
    assert metrics.margin > 0
    of_reference = jax.grad(
        lambda reference: vrpo_loss(moved, reference, chosen, rejected, jax.random.key(0), draws=1)[0]
    )(model)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_reference))


def test_a_supervised_part_is_the_chosen_responses_likelihood_per_token():
    model = tiny("llada")
    prompt, answer = random_tokens(model.spec, 4, 5), random_tokens(model.spec, 4, 6)
    mask = jnp.arange(6) < jnp.asarray([6, 3, 1, 4])[:, None]
    chosen, rejected = Batch(prompt, answer, answer_mask=mask), Batch(prompt, answer[:, ::-1])
    key, draws = jax.random.key(3), 4
    of = lambda weight: vrpo_loss(model, model, chosen, rejected, key, supervised=weight, draws=draws)
    (alone, _), (both, metrics) = of(0.0), of(2.0)
    masks = elbo_masks(jax.random.split(key)[0], chosen, draws)
    elbo = np.asarray(response_log_probs(model, chosen, masks), np.float64)
    assert not elbo[~np.asarray(mask)].any()
    expected = -2 * np.mean(elbo.sum(1) / np.asarray(mask).sum(1))
    np.testing.assert_allclose(both - alone, expected, rtol=1e-5)
    assert metrics.loss == both > alone


def test_advantages_are_relative_to_the_group():
    rewards = np.asarray([1, 0, 0, 1, 2, 2, 2, 2, 0, 0, 0, 4], np.float32)
    groups = rewards.reshape(3, 4)
    centred = groups - groups.mean(1, keepdims=True)
    np.testing.assert_allclose(group_advantages(rewards, 4, normalise=False), centred.ravel())
    spread = np.where(groups.std(1, keepdims=True) == 0, 1, groups.std(1, keepdims=True))
    np.testing.assert_allclose(group_advantages(rewards, 4), (centred / spread).ravel(), rtol=1e-6)
    assert not np.any(group_advantages(np.full(6, 0.1, np.float32), 3))  # not a rounding error over another


def test_grpo_is_the_formula():
    log_prob, old, reference = (array.astype(np.float64) for array in TOKENS)
    counted = np.arange(5) < np.asarray([5, 3, 1, 4, 0, 2])[:, None]
    ratio = np.exp(log_prob - old)
    total = np.zeros(6)
    for i in range(6):
        for k in np.flatnonzero(counted[i]):
            clipped = min(max(ratio[i, k], 0.8), 1.2)
            surrogate = min(ratio[i, k] * ONE[i], clipped * ONE[i])
            x = reference[i, k] - log_prob[i, k]
            total[i] += (surrogate - 0.05 * (np.exp(x) - x - 1)) / counted[i].sum()
    loss, metrics = grpo_loss(*TOKENS[:2], ONE, counted=counted, reference=TOKENS[2], kl=0.05)
    np.testing.assert_allclose(loss, -total.mean(), rtol=1e-4)
    assert 0 < metrics.clipped < 1
    assert metrics.kl > 0


def test_grpo_stops_at_the_clip_range_and_begins_as_the_policy_gradient():
    advantage = np.asarray([1.0, -1.0, 1.0, -1.0, 0.0, 0.0], np.float32)
    gradient = jax.grad(lambda log_prob, old: grpo_loss(log_prob, old, advantage)[0])
    same = gradient(TOKENS[0], TOKENS[0])
    np.testing.assert_allclose(same, -advantage[:, None] * np.ones((6, 5)) / 30, rtol=1e-5)
    assert not np.any(gradient(TOKENS[0] + 0.5, TOKENS[0])[::2])  # a good one that is likely enough
    assert not np.any(gradient(TOKENS[0] - 0.5, TOKENS[0])[1::2])  # a bad one that is unlikely enough
    assert np.all(gradient(TOKENS[0] - 0.5, TOKENS[0])[:4:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dpo_loss(ONE, TWO, THREE, FOUR, beta=0.0), "beta=0.0 must be"),
        (lambda: dpo_loss(ONE, TWO[:3], THREE, FOUR), r"rejected has shape \(3,\); expected \(6,\)"),
        (lambda: group_advantages(ONE, 4), r"rewards have shape \(6,\); expected a multiple of group=4"),
        (lambda: group_advantages(ONE, 1), "group=1 must be"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, clip=1.0), "clip=1.0 must be"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, kl=-0.1), "kl=-0.1 must be"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, kl=0.1), "kl=0.1 and reference=None go together"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, reference=TOKENS[2]), "kl=0.0 and reference=given go together"),
        (lambda: grpo_loss(*TOKENS[:2], ONE[:2]), r"advantage has shape \(2,\); expected \(6,\)"),
        (lambda: grpo_loss(TOKENS[0], TOKENS[1][:, :2], ONE), r"old has shape \(6, 2\); expected \(6, 5\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
