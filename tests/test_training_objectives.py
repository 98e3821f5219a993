"""Masked estimators of responses; preference and policy-gradient objectives against plain NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.training import (
    Batch,
    Masks,
    dpo_loss,
    elbo_masks,
    group_advantages,
    grpo_loss,
    one_step_masks,
    response_log_probs,
    until_end,
    vrpo_loss,
)
from tests import refuses
from tests.models import families, random_tokens, tiny

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

B, PROMPT, ANSWER, PADS, LENGTHS = 3, 5, 4, (0, 2, 1), (4, 2, 3)
KEY = jax.random.key(3)


def ragged(family: str = "llada") -> Batch:
    """Prompts padded on the left, answers on the right."""
    prompt, answer = (random_tokens(tiny(family).spec, B, n, seed=n) for n in (PROMPT, ANSWER))
    prompt_mask = np.arange(PROMPT) >= np.asarray(PADS)[:, None]
    return Batch(prompt, answer, prompt_mask, np.arange(ANSWER) < np.asarray(LENGTHS)[:, None])


def by_hand(model: dj.Model, batch: Batch, masks: Masks) -> np.ndarray:
    """Each draw of each example alone, its padding cut off, float64 after the network."""
    out, shifted = np.zeros((B, ANSWER)), int(model.spec.shifted)
    draws = len(masks.answer)
    for j in range(draws):
        for b, (pad, length) in enumerate(zip(PADS, LENGTHS, strict=True)):
            prompt, answer = batch.prompt[b, pad:].copy(), batch.answer[b, :length].copy()
            hidden = np.asarray(masks.answer[j, b, :length])
            answer[hidden] = model.spec.mask_id
            if masks.prompt is not None:
                prompt[np.asarray(masks.prompt[j, b, pad:])] = model.spec.mask_id
            tokens = np.concatenate([prompt, answer])
            logits = np.asarray(dj.forward(model, tokens[None])[0], np.float64)
            for k in np.flatnonzero(hidden):
                row = logits[len(prompt) + k - shifted]
                log_prob = row[batch.answer[b, k]] - row.max() - np.log(np.exp(row - row.max()).sum())
                out[b, k] += float(masks.weight[j, b]) * log_prob / draws
    return out


@families("llada")
def test_plain_forwards_give_the_same(family):
    model, batch = tiny(family), ragged(family)
    for masks in (one_step_masks(KEY, batch, 0.4), elbo_masks(KEY, batch, 6)):
        ours = response_log_probs(model, batch, masks, chunk=2)
        np.testing.assert_allclose(ours, by_hand(model, batch, masks), rtol=2e-5, atol=2e-5)
        assert not np.asarray(ours)[~batch.answer_mask].any()


def test_the_sum_is_the_log_likelihood_for_the_same_masks():
    model, batch = tiny("llada"), ragged()._replace(answer_mask=None)
    masks = elbo_masks(KEY, batch, 8)
    ours = jnp.sum(response_log_probs(model, batch, masks), axis=1)
    likelihood = dj.log_likelihood(
        model, batch.prompt, batch.answer, prompt_mask=batch.prompt_mask, masks=masks.answer
    )
    np.testing.assert_allclose(ours, likelihood, rtol=1e-5)


def test_levels_spread_evenly_and_each_is_uniform():
    batch = ragged()
    draw = jax.jit(jax.vmap(lambda key: elbo_masks(key, batch, 4)))
    masks = jax.tree.map(np.asarray, draw(jax.random.split(KEY, 400)))
    sizes = masks.answer.sum(-1)  # [400 4 b]
    assert not masks.answer[..., ~batch.answer_mask].any()
    for b, length in enumerate(LENGTHS):
        np.testing.assert_allclose(masks.weight[..., b], length / sizes[..., b], rtol=1e-6)
        counts = np.bincount(sizes[..., b].ravel(), minlength=length + 1)
        assert counts[0] == 0
        assert np.abs(counts[1:] / sizes[..., b].size - 1 / length).max() < 0.05
        hidden = masks.answer[..., b, :length].mean((0, 1))
        assert np.abs(hidden - hidden.mean()).max() < 0.05
    assert all(set(group) == {1, 2, 3, 4} for group in sizes[..., 0])  # stratified
    shared = np.asarray(elbo_masks(KEY, batch, 6, masks_per_level=3).answer.sum(-1))
    assert (shared[:3] == shared[0]).all()
    assert (shared[3:] == shared[3]).all()


def test_one_step_masks_hide_all_of_the_answer_and_some_of_the_prompt():
    batch = Batch(
        np.zeros((64, 40), np.int32), np.zeros((64, 3), np.int32), np.arange(40) >= np.full((64, 1), 9)
    )
    masks = one_step_masks(KEY, batch, 0.3)
    assert masks.prompt is not None
    assert np.asarray(masks.answer).all()
    assert not np.asarray(masks.prompt)[..., :9].any()
    assert abs(float(masks.prompt[..., 9:].mean()) - 0.3) < 0.03
    assert one_step_masks(KEY, batch, 0.0).prompt is None


def test_chunks_and_what_is_recomputed_change_nothing():
    model, batch = tiny("dream"), ragged("dream")
    masks = elbo_masks(KEY, batch, 5)
    value = lambda model, **options: jnp.sum(response_log_probs(model, batch, masks, **options))
    expected, gradient = jax.value_and_grad(value)(model)
    ours, changed = jax.value_and_grad(functools.partial(value, chunk=9, remat=True))(model)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(changed.params["embed"], gradient.params["embed"], rtol=1e-3, atol=1e-4)


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_number_of_draws(optimized):
    model = tiny("llada")
    batch = Batch(jnp.zeros((1, 32), jnp.int32), jnp.zeros((1, 32), jnp.int32))

    def temporary(draws: int) -> int:
        masks = Masks(None, jnp.ones((draws, 1, 32), bool), jnp.ones((draws, 1)))
        total = lambda model, masks: jnp.sum(response_log_probs(model, batch, masks))
        compiled = jax.jit(jax.grad(total)).lower(model, masks).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary(2), temporary(16)
    assert many - few < 14 * 64 * 32 * 4  # of the draws' residual streams alone


def test_an_answer_counts_up_to_its_first_end():
    answer = jnp.asarray([[3, 1, 4, 1], [3, 3, 3, 3], [1, 1, 3, 3], [3, 2, 1, 3]])
    counted = [[1, 1, 0, 0], [1] * 4, [1, 0, 0, 0], [1, 1, 1, 0]]
    np.testing.assert_array_equal(until_end(answer, 1), np.array(counted, bool))
    assert until_end(answer, 1, 2).tolist()[3] == [True, True, False, False]
    assert until_end([[3, 1, 5], [0]], 1).tolist() == [[True, True, False], [True, False, False]]


RNG = np.random.default_rng(0)
ONE, TWO, THREE, FOUR = RNG.normal(size=(4, 6)).astype(np.float32)
TOKENS = RNG.normal(-1, 0.3, size=(3, 6, 5)).astype(np.float32)  # log_prob, old, reference


def test_dpo_is_the_formula():
    loss, metrics = jax.jit(functools.partial(dpo_loss, beta=0.3))(ONE, TWO, THREE, FOUR)
    margin = 0.3 * ((ONE - THREE) - (TWO - FOUR)).astype(np.float64)
    np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp(-margin))), rtol=1e-5)
    np.testing.assert_allclose(metrics.margin, margin.mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics.accuracy, np.mean(margin > 0))
    gradient = jax.grad(lambda all_four: jax.jit(dpo_loss)(*all_four)[0])((ONE, TWO, THREE, FOUR))
    assert (gradient[0] < 0).all()  # it pulls the pair apart, and leaves the reference alone
    np.testing.assert_allclose(gradient[1], -gradient[0], rtol=1e-6)
    assert not np.any(gradient[2:])
    assert np.isnan(dpo_loss(np.append(ONE[1:], np.float32(np.nan)), TWO, THREE, FOUR)[0])


def test_vrpo_begins_at_log_two_and_learns_from_its_gradient():
    """Shared masks: where policy and reference are one model, every margin is exactly 0."""
    model = tiny("llada")
    prompt = random_tokens(model.spec, 4, 5)
    chosen, rejected = (Batch(prompt, random_tokens(model.spec, 4, n, seed=n)) for n in (3, 4))
    of = lambda model, reference, **options: vrpo_loss(
        model, reference, chosen, rejected, jax.random.key(0), **options
    )
    value = jax.jit(jax.value_and_grad(lambda m, r: of(m, r, draws=4, beta=0.5), has_aux=True))
    (loss, metrics), gradient = value(model, model)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    assert metrics.margin == 0
    step = lambda p, g: p - 2e-3 * g / jnp.maximum(jnp.sqrt(jnp.mean(g**2)), 1e-6)
    moved = jax.jit(lambda *trees: jax.tree.map(step, *trees))(model, gradient)
    (after, metrics), _ = value(moved, model)
    assert after < loss - 0.01
    assert metrics.margin > 0
    of_reference = jax.jit(jax.grad(lambda reference: of(moved, reference, draws=1)[0]))(model)
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
    centered = groups - groups.mean(1, keepdims=True)
    np.testing.assert_allclose(group_advantages(rewards, 4, normalize=False), centered.ravel())
    spread = np.where(groups.std(1, keepdims=True) == 0, 1, groups.std(1, keepdims=True))
    np.testing.assert_allclose(group_advantages(rewards, 4), (centered / spread).ravel(), rtol=1e-6)
    assert not np.any(group_advantages(np.full(6, 0.1, np.float32), 3))  # not a rounding error over another


STEP = float(np.nextafter(np.float32(1), np.float32(2)))  # of float32 after 1
SUMMED = float(np.sum(np.full(9, 0.1, np.float32)))  # 0.9 but for rounding
JITTED = jax.jit(group_advantages, static_argnums=(1, 2))


@pytest.mark.parametrize("call", [group_advantages, JITTED], ids=["eager", "jit"])
def test_advantages_know_no_scale_and_make_nothing_of_rounding(call):
    """Rewards that are probabilities of answers, squares of losses, or sums in another order."""
    at = lambda rewards, dtype: np.asarray(call(jnp.asarray(np.asarray(rewards, dtype)), 4, True))
    for exponent in (-37, -30, -25, 0, 20, 25, 38):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            found = at(np.array([1, 3, 2, 0]) * 10.0**exponent, dtype)
            rtol = 1e-6 if dtype == np.float32 else 0.03
            np.testing.assert_allclose(
                found, np.array([-1, 3, 1, -3]) / np.sqrt(5), rtol=rtol, err_msg=exponent
            )
    whole = ([True, False, True, True], bool), ([2**31 - 1, 2**31 - 2] + 2 * [2**31 - 1], np.int32)
    for rewards, dtype in (*whole, ([9, 8, 9, 9], np.uint8), ([1e6, 999999, 1e6, 1e6], np.float32)):
        np.testing.assert_allclose(at(rewards, dtype), np.array([1, -3, 1, 1]) / np.sqrt(3), rtol=1e-6)
    far = at([3e38, -3e38, 3e38, 0], np.float32)  # whose differences float32 does not hold
    np.testing.assert_allclose(far, np.array([3, -5, 3, -1]) / np.sqrt(11), rtol=1e-6)
    np.testing.assert_allclose(at([1e25, 1, 2, 3], np.float32), np.array([3, -1, -1, -1]) / np.sqrt(3))
    for equal in ([1, 1, 1, STEP], [0.9, 0.9, SUMMED, 0.9], [0] * 4, [-1e-30 * STEP, -1e-30, -1e-30, -1e-30]):
        for normalize in (True, False):
            assert not np.any(call(jnp.asarray(equal, jnp.float32), 4, normalize)), equal


def test_advantages_of_numbers_of_the_host_are_computed_in_float64():
    for scale in (1e-300, 1e300):
        found = group_advantages([scale, 3 * scale, 2 * scale, 0], 4)
        np.testing.assert_allclose(found, np.array([-1, 3, 1, -3]) / np.sqrt(5), rtol=1e-6)
    assert not np.any(group_advantages([0.9, 0.9, SUMMED, 0.9], 4))
    refuses(
        "advantages holds 7.5e\\+299; expected finite", lambda: group_advantages([1e300, 0, 0, 0], 4, False)
    )
    refuses(
        "advantage holds 1e\\+300; expected finite",
        lambda: grpo_loss(np.zeros((1, 2)), np.zeros((1, 2)), [1e300]),
    )


def test_grpo_is_the_formula():
    log_prob, old, reference = (array.astype(np.float64) for array in TOKENS)
    counted = np.arange(5) < np.asarray([5, 3, 1, 4, 0, 2])[:, None]
    ratio = np.exp(log_prob - old)
    total, x = np.zeros(6), reference - log_prob
    kl = np.exp(x) - x - 1
    for i in range(6):
        for k in np.flatnonzero(counted[i]):
            clipped = min(max(ratio[i, k], 0.8), 1.2)
            surrogate = min(ratio[i, k] * ONE[i], clipped * ONE[i])
            total[i] += (surrogate - 0.05 * kl[i, k]) / counted[i].sum()
    grpo = jax.jit(grpo_loss, static_argnames="kl")
    loss, metrics = grpo(*TOKENS[:2], ONE, counted=counted, reference=TOKENS[2], kl=0.05)
    np.testing.assert_allclose(loss, -total.mean(), rtol=1e-4)
    # Metrics are means over the tokens that count, of all answers.
    np.testing.assert_allclose(metrics.ratio, ratio[counted].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics.clipped, (abs(ratio - 1) > 0.2)[counted].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics.kl, kl[counted].mean(), rtol=1e-5)

    # What does not count may be anything: neither values nor gradients change.
    objective = lambda tokens: grpo_loss(*tokens[:2], ONE, counted=counted, reference=tokens[2], kl=0.05)
    value = jax.jit(jax.value_and_grad(objective, has_aux=True))
    for waste in (np.inf, -np.inf, np.nan, 200.0):
        for each in range(3):
            tokens = list(TOKENS)
            tokens[each] = np.where(counted, TOKENS[each], np.float32(waste))
            ours, again = value(tokens), value(list(TOKENS))
            same = lambda a, b: np.array_equal(a, b)
            assert jax.tree.all(jax.tree.map(same, ours, again))
    policy = TOKENS[0]
    _, metrics = grpo(policy, policy, ONE, counted=np.arange(6)[:, None].repeat(5, 1) == 2)
    assert (metrics.ratio, metrics.clipped) == (1, 0)
    loss, metrics = grpo_loss(policy, policy, ONE, counted=np.zeros((6, 5), int))
    assert loss == metrics.ratio == metrics.clipped == metrics.kl == 0


def test_grpo_stops_at_the_clip_range_and_begins_as_the_policy_gradient():
    advantage = np.asarray([1.0, -1.0, 1.0, -1.0, 0.0, 0.0], np.float32)
    gradient = jax.grad(lambda log_prob, old: grpo_loss(log_prob, old, advantage)[0])
    same = gradient(TOKENS[0], TOKENS[0])
    np.testing.assert_allclose(same, -advantage[:, None] * np.ones((6, 5)) / 30, rtol=1e-5)
    assert not np.any(gradient(TOKENS[0] + 0.5, TOKENS[0])[::2])  # a good one that is likely enough
    assert not np.any(gradient(TOKENS[0] - 0.5, TOKENS[0])[1::2])  # a bad one that is unlikely enough
    assert np.all(gradient(TOKENS[0] - 0.5, TOKENS[0])[:4:2])


WILD = [0.0, 0.1, -0.1, 3.0, -3.0, 30.0, 70.0, -70.0, 87.0, 89.0, 1e4, -1e4, np.inf, -np.inf]


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0, 1e6, -1e6])
def test_grpo_is_finite_at_all_distances_and_exact_where_float32_is(advantage):
    """A response for each log-ratio: its gradient by the formula, in float64, is there alone."""
    distance = np.asarray(WILD)
    log_prob = np.where(distance == -np.inf, -np.inf, -1.0).astype(np.float32)[:, None]
    old = np.where(np.isinf(distance), -1, -1 - distance).astype(np.float32)
    old = np.where(distance == np.inf, -np.inf, old).astype(np.float32)[:, None]
    given = np.full(len(WILD), advantage, np.float32)
    (loss, metrics), gradient = jax.value_and_grad(grpo_loss, has_aux=True)(log_prob, old, given)
    assert np.isfinite([loss, *metrics]).all()
    assert np.isfinite(gradient).all()
    exact = np.float64(log_prob) - np.where(np.isinf(old), 0, old)
    unclipped = (exact <= np.log1p(0.2)) if advantage > 0 else (exact >= np.log1p(-0.2))
    formula = np.where(unclipped, -advantage * np.exp(np.minimum(exact, 80)) / len(WILD), 0)
    most = 80 - np.log(max(abs(advantage), 1))
    tried = (distance < most) & np.isfinite(distance)
    np.testing.assert_allclose(gradient[tried], formula[tried], rtol=1e-5)
    assert not np.any(gradient[distance > 88])


def test_a_reference_may_be_any_distance_away():
    """From policy to reference for the divergence, and between both for preferences."""
    tokens = np.full((len(WILD), 1), -1, np.float32)
    reference = (tokens + np.asarray(WILD)[:, None]).astype(np.float32)
    divergence = lambda policy, of, kl: grpo_loss(policy, policy, np.ones(len(WILD)), reference=of, kl=kl)
    cases = (tokens, reference), (reference, tokens), (tokens * np.inf, tokens * np.inf)
    for (policy, of), kl in itertools.product(cases, (0.5, 1e28)):
        (loss, metrics), gradient = jax.value_and_grad(divergence, has_aux=True)(policy, of, kl)
        assert np.isfinite([loss, *metrics]).all()
        assert np.isfinite(gradient).all()
    near = np.abs(WILD) < 80
    x = np.float64(reference - tokens)[near, 0]
    (_, metrics), gradient = jax.value_and_grad(
        lambda policy: grpo_loss(policy, policy, np.zeros(near.sum()), reference=reference[near], kl=0.5),
        has_aux=True,
    )(tokens[near])
    np.testing.assert_allclose(metrics.kl, np.mean(np.expm1(x) - x), rtol=1e-5)
    np.testing.assert_allclose(gradient[:, 0], 0.5 * (1 - np.exp(x)) / near.sum(), rtol=1e-4, atol=1e-8)
    pairs = jnp.asarray(reference[:, 0])
    for rejected in (pairs, pairs[::-1], jnp.full(len(WILD), -jnp.inf)):
        arguments = pairs, rejected, jnp.full(len(WILD), -1.0), pairs
        (loss, metrics), gradients = jax.value_and_grad(dpo_loss, (0, 1), has_aux=True)(*arguments)
        assert np.isfinite([loss, *metrics, *np.ravel(gradients)]).all()


def estimate(**changes):
    """`response_log_probs` of a batch, with changes of its arguments."""
    batch = ragged()
    arguments = dict(model=tiny("llada"), batch=batch, masks=elbo_masks(KEY, batch, 2)) | changes
    return response_log_probs(**arguments)


TRUE = lambda *shape: np.ones(shape, bool)
UNEQUAL = Batch(np.zeros((2, 3), int), np.zeros((3, 3), int))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate(model=3), "model=3 must be"),
        (lambda: estimate(batch=3), "batch=3 must be a Batch"),
        (lambda: estimate(masks=3), "masks=3 must be a Masks, such as elbo_masks"),
        (lambda: estimate(chunk=0), "chunk=0 must be"),
        (lambda: estimate(remat=2), "remat=2 must be"),
        (lambda: estimate(batch=UNEQUAL), "prompt has 2 sequences, answer has 3"),
        (
            lambda: estimate(masks=Masks(None, TRUE(1, 2, 4), TRUE(1, 2))),
            r"masks.answer has shape \(1, 2, 4\)",
        ),
        (lambda: estimate(masks=Masks(None, TRUE(0, 3, 4), TRUE(0, 3))), "masks.answer has shape"),
        (lambda: estimate(masks=Masks(TRUE(1, 3, 9), TRUE(1, 3, 4), TRUE(1, 3))), "masks.prompt"),
        (lambda: elbo_masks(KEY, ragged(), 3, masks_per_level=2), "draws=3 must be a multiple"),
        (lambda: elbo_masks(KEY, ragged(), 0), "draws=0 must be"),
        (lambda: elbo_masks(3, ragged()), "key=3 must be a random key"),
        (lambda: elbo_masks(jax.random.split(KEY), ragged()), "expected one key"),
        (lambda: one_step_masks(KEY, ragged(), 1.0), "prompt_masking=1.0 must be"),
        (lambda: one_step_masks(KEY, ragged()._replace(answer_mask=TRUE(3, 3))), "answer_mask has"),
        (lambda: dpo_loss(ONE, TWO, THREE, FOUR, beta=0.0), "beta=0.0 must be"),
        (lambda: dpo_loss(ONE, TWO[:3], THREE, FOUR), r"rejected has shape \(3,\); expected \(6,\)"),
        (
            lambda: group_advantages(ONE, 4),
            r"rewards have shape \(6,\); expected \[responses\], a multiple of group=4",
        ),
        (lambda: group_advantages(ONE, 1), "group=1 must be"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, clip=1.0), "clip=1.0 must be"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, kl=-0.1), "kl=-0.1 must be"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, kl=1e30, reference=TOKENS[2]), r"kl=1e\+30 must be .*1e\+28"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, kl=0.1), "kl=0.1 and reference=None do not go together"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, reference=TOKENS[2]), "kl=0.0 and reference=given do not go"),
        (lambda: grpo_loss(*TOKENS[:2], ONE[:2]), r"advantage has shape \(2,\); expected \(6,\)"),
        (lambda: grpo_loss(*TOKENS[:2], ONE * np.nan), "advantage holds nan; expected finite"),
        (lambda: grpo_loss(*TOKENS[:2], ["a"] * 6), "advantage has dtype"),
        (lambda: grpo_loss(TOKENS[0] > 0, TOKENS[1], ONE), "log_prob has dtype bool; expected floats"),
        (lambda: grpo_loss(ONE, ONE, ONE), r"log_prob has shape \(6,\); expected \[responses, tokens\]"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, counted=TOKENS[0]), "counted has dtype float32"),
        (lambda: grpo_loss(*TOKENS[:2], ONE, counted=TRUE(6, 4)), r"counted has shape \(6, 4\); expected"),
        (lambda: group_advantages([1.0, np.inf], 2), "rewards holds inf; expected finite numbers"),
        (lambda: until_end([[1.5]], 1), "answer has dtype float64"),
        (lambda: dpo_loss(ONE[:0], TWO[:0], THREE[:0], FOUR[:0]), r"chosen has shape \(0,\)"),
        (lambda: grpo_loss(TOKENS[0], TOKENS[1][:, :2], ONE), r"old has shape \(6, 2\); expected \(6, 5\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    refuses(message, call)
