"""Masked estimators of responses: against plain forwards, the likelihood, and their expectation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.training import Batch, Masks, elbo_masks, one_step_masks, response_log_probs, until_end
from tests.models import FAMILIES, random_tokens, tiny

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


@pytest.mark.parametrize("family", FAMILIES)
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


def test_masks_per_level_share_their_level():
    batch = ragged()
    sizes = np.asarray(elbo_masks(KEY, batch, 6, masks_per_level=3).answer.sum(-1))
    assert (sizes[:3] == sizes[0]).all()
    assert (sizes[3:] == sizes[3]).all()


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


def test_shared_masks_cancel_between_models_that_are_alike():
    """What antithetic sampling is for: the difference of two estimates varies less than with own masks."""
    model, batch = tiny("llada"), ragged()._replace(answer_mask=None)
    close = dataclasses.replace(model, params=jax.tree.map(lambda p: p * 1.001, model.params))
    of = jax.jit(
        lambda model, key: jnp.sum(response_log_probs(model, batch, elbo_masks(key, batch, 4)), axis=1)
    )
    shared, own = [], []
    for seed in range(12):
        one, other = jax.random.split(jax.random.key(seed))
        shared.append(of(close, one) - of(model, one))
        own.append(of(close, one) - of(model, other))
    assert (np.std(shared, axis=0) < 0.2 * np.std(own, axis=0)).all()


def test_chunks_and_what_is_recomputed_change_nothing():
    model, batch = tiny("dream"), ragged("dream")
    masks = elbo_masks(KEY, batch, 5)
    value = lambda model, **options: jnp.sum(response_log_probs(model, batch, masks, **options))
    expected, gradient = jax.value_and_grad(value)(model)
    ours, changed = jax.value_and_grad(functools.partial(value, chunk=9, remat=True))(model)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    np.testing.assert_allclose(changed.params["embed"], gradient.params["embed"], rtol=1e-3, atol=1e-4)

    # The gradient against finite differences along a random direction.
    total, step = jax.jit(value), 2e-3
    direction = jax.random.normal(KEY, gradient.params["norm"].shape)
    moved = lambda by: dataclasses.replace(
        model, params=model.params | {"norm": model.params["norm"] + by * direction}
    )
    numeric = (total(moved(step)) - total(moved(-step))) / (2 * step)
    np.testing.assert_allclose(jnp.sum(gradient.params["norm"] * direction), numeric, rtol=0.02)


def test_memory_does_not_grow_with_the_number_of_draws(optimised):
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
    assert until_end(answer, 1).tolist() == [
        [True, True, False, False],
        [True] * 4,
        [True, False, False, False],
        [True, True, True, False],
    ]
    assert until_end(answer, 1, 2).tolist()[3] == [True, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model=3), "model=3 must be"),
        (dict(batch=3), "batch=3 must be a Batch"),
        (dict(masks=3), "masks=3 must be Masks"),
        (dict(chunk=0), "chunk=0 must be"),
        (dict(remat=2), "remat=2 must be"),
        (dict(batch=Batch(np.zeros((2, 3), int), np.zeros((3, 3), int))), r"answer \(3, 3\); expected"),
        (
            dict(masks=Masks(None, np.ones((1, 2, 4), bool), np.ones((1, 2)))),
            r"masks.answer has shape \(1, 2, 4\)",
        ),
        (dict(masks=Masks(None, np.ones((0, 3, 4), bool), np.ones((0, 3)))), "masks.answer has shape"),
        (
            dict(masks=Masks(np.ones((1, 3, 9), bool), np.ones((1, 3, 4), bool), np.ones((1, 3)))),
            "masks.prompt",
        ),
    ],
)
def test_bad_input_is_refused(options, message):
    batch = ragged()
    arguments = dict(model=tiny("llada"), batch=batch, masks=elbo_masks(KEY, batch, 2)) | options
    with pytest.raises(ValueError, match=message):
        response_log_probs(**arguments)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda batch: elbo_masks(KEY, batch, 3, masks_per_level=2), "draws=3 must be a multiple"),
        (lambda batch: elbo_masks(KEY, batch, 0), "draws=0 must be"),
        (lambda batch: elbo_masks(3, batch), "key=3 must be a random key"),
        (lambda batch: elbo_masks(jax.random.split(KEY), batch), "expected one key"),
        (lambda batch: one_step_masks(KEY, batch, 1.0), "prompt_masking=1.0 must be"),
        (
            lambda batch: one_step_masks(KEY, batch._replace(answer_mask=np.ones((3, 3), bool))),
            "answer_mask has",
        ),
        (lambda batch: one_step_masks(KEY, batch._replace(prompt_mask=np.ones((3, 5)))), "prompt_mask has"),
    ],
)
def test_bad_draws_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw(ragged())
