"""The Monte-Carlo log-likelihood against brute force from plain forwards."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.decoding.likelihood import stratified_masks, token_cross_entropy
from tests.models import EXHAUSTIVE, families, random_tokens, tiny

PROMPT, ANSWER, B = 4, 3, 2
PADS = (0, 2)
PADDING = jnp.arange(PROMPT) >= jnp.asarray(PADS)[:, None]
SUBSETS = np.asarray([m for m in itertools.product([False, True], repeat=ANSWER) if any(m)])


@functools.cache
def texts(family: str) -> tuple[jax.Array, jax.Array]:
    """Prompts and answers."""
    return tuple(jnp.asarray(random_tokens(tiny(family).spec, B, n, seed=n)) for n in (PROMPT, ANSWER))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def brute_force(family: str, b: int, mask: np.ndarray, cfg_scale: float = 0.0) -> float:
    """One draw for one row: the row alone, its padding cut off, float64 after the network."""
    truth = brute_force_terms(family, b, mask, cfg_scale)
    return float(truth[mask].sum() * ANSWER / mask.sum())


def brute_force_terms(family: str, b: int, mask: np.ndarray, cfg_scale: float = 0.0) -> np.ndarray:
    """The log-probabilities of a row's answer tokens under a mask."""
    model, (prompt, answer) = tiny(family), map(np.asarray, texts(family))
    prompt = prompt[b, PADS[b] :]
    answer = answer[b]

    def logits(prompt):
        tokens = np.concatenate([prompt, np.where(mask, model.spec.mask_id, answer)])
        raw = np.asarray(dj.forward(model, jnp.asarray(tokens[None], jnp.int32))[0], np.float64)
        first = len(prompt) - int(model.spec.shifted)
        return raw[first : first + ANSWER]

    guided = logits(prompt)
    if cfg_scale:
        unconditional = logits(np.full_like(prompt, model.spec.mask_id))
        guided = unconditional + (cfg_scale + 1) * (guided - unconditional)
    return log_softmax(guided)[np.arange(ANSWER), answer]


def masks_for(draws: int) -> np.ndarray:
    """Different subsets for the two rows."""
    order = np.random.default_rng(0).integers(0, len(SUBSETS), (draws, B))
    return SUBSETS[order]


@pytest.mark.parametrize(
    ("family", "cfg_scale"),
    [("llada", 1.2), ("dream", 0.0), *[("llada", 0.0), ("dream", 0.5)] * EXHAUSTIVE],
)
def test_given_masks_equal_brute_force_of_each_row_alone(family, cfg_scale):
    prompt, answer = texts(family)
    masks = masks_for(5)
    ours = dj.log_likelihood(
        tiny(family), prompt, answer, prompt_mask=PADDING, masks=jnp.asarray(masks),
        cfg_scale=cfg_scale, chunk=2,
    )  # fmt: skip
    expected = [np.mean([brute_force(family, b, m[b], cfg_scale) for m in masks]) for b in range(B)]
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, rtol=2e-5)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_by_confidence_the_most_probable_true_token_is_revealed_first(family):
    """Of each row alone: a loop over plain passes; padding at either end changes nothing."""
    prompt, answer = texts(family)
    expected = []
    for b in range(B):
        mask, total = np.ones(ANSWER, bool), 0.0
        while mask.any():
            alone = {i: brute_force_terms(family, b, mask)[i] for i in np.flatnonzero(mask)}
            best = max(alone, key=alone.get)
            mask[best], total = False, total + alone[best]
        expected.append(total)
    options = dict(prompt_mask=PADDING, order="confidence")
    ours = dj.log_likelihood(tiny(family), prompt, answer, **options)
    np.testing.assert_allclose(ours, expected, rtol=2e-5)
    padded, real = jnp.pad(answer, ((0, 0), (0, 2))), jnp.arange(ANSWER + 2)[None] < jnp.full((B, 1), ANSWER)
    if family == "llada":
        again = dj.log_likelihood(tiny(family), prompt, padded, answer_mask=real, **options)
        np.testing.assert_allclose(again, expected, rtol=2e-5)
    with pytest.raises(ValueError, match="key has no effect with order='confidence'"):
        dj.log_likelihood(tiny(family), prompt, answer, **options, key=jax.random.key(0))


def test_draws_average_to_the_expectation_over_all_masks():
    """Sizes 1 and 2 are equally likely, and so are the masks of a size: three masks of a two-token answer."""
    model, (prompt, answer) = tiny("llada"), texts("llada")
    answer = answer[:, :2]
    value = lambda mask: dj.log_likelihood(
        model, prompt, answer, masks=jnp.broadcast_to(jnp.asarray(mask), (1, B, 2)), chunk=1
    )
    first, second, both = value([True, False]), value([False, True]), value([True, True])
    expected = (first / 2 + second / 2) / 2 + both / 2
    draws = 512
    ours = dj.log_likelihood(model, prompt, answer, draws=draws, strata=2, key=jax.random.key(0), chunk=64)
    spread = np.abs(first - second) / 2  # of the one draw in two that is random
    np.testing.assert_array_less(np.abs(ours - expected), 3.5 * spread * math.sqrt(2 / draws) / 2 + 1e-4)
    assert (np.abs(first - second) > 0.5).all()  # the order of masking matters


@pytest.mark.parametrize(
    ("length", "strata", "padding"),
    [(1, 4, 0), (2, 2, 0), (5, 16, 0), (12, 4, 0), (16, 16, 0), (7, 3, 0), (4, 8, 2)],
)
def test_sizes_spread_evenly_over_one_to_the_length(length, strata, padding):
    real = jnp.arange(length + padding) < length
    draw = jax.jit(jax.vmap(lambda key: stratified_masks(key, length + padding, strata, real)))
    masks = np.asarray(draw(jax.random.split(jax.random.key(0), 200)))
    assert masks.shape == (200, strata, length + padding)
    assert not masks[..., length:].any()
    for group in masks.sum(-1):
        grid = np.round(group[0] + np.arange(strata) * length / strata).astype(int)  # half to even
        assert group.tolist() == ((grid - 1) % length + 1).tolist()
        assert len(set(group.tolist())) == min(strata, length)
    assert set(masks.sum(-1)[:, 0].tolist()) == set(range(1, length + 1))  # the first size itself is uniform
    by_position = masks[..., :length].mean((0, 1))
    assert (np.abs(by_position - by_position.mean()) < 0.15).all()


RAGGED = np.arange(ANSWER) < np.array([[3], [2]])


@families("llada")
def test_the_contributions_of_tokens_add_up(family):
    model, (prompt, answer) = tiny(family), texts(family)
    masks = masks_for(5)
    options = dict(prompt_mask=PADDING, masks=jnp.asarray(masks), chunk=2)
    ours = np.asarray(dj.token_log_likelihoods(model, prompt, answer, **options))
    np.testing.assert_allclose(ours.sum(1), dj.log_likelihood(model, prompt, answer, **options), rtol=1e-5)
    everything = np.ones((1, B, ANSWER), bool)
    of_all = dj.token_log_likelihoods(model, prompt, answer, prompt_mask=PADDING, masks=everything)
    entropy = jax.jit(token_cross_entropy)(model, prompt, answer, PADDING, everything[0])
    np.testing.assert_allclose(of_all, -entropy, rtol=1e-5)
    assert (ours[~masks.any(axis=0)] == 0).all()


@pytest.mark.parametrize(("family", "cfg_scale"), [("llada", 0.7), *[("dream", 0.0)] * EXHAUSTIVE])
def test_ragged_answers_equal_each_alone(family, cfg_scale):
    """Whatever their padding holds, mask ids included."""
    model, (prompt, answer) = tiny(family), texts(family)
    masks = np.array([[True, False, True], [False, True, True], [True, True, False]])[:, None] & RAGGED
    padded = jnp.where(RAGGED, answer, model.spec.mask_id)
    options = dict(prompt_mask=PADDING, answer_mask=RAGGED, masks=masks, cfg_scale=cfg_scale)
    ours = dj.token_log_likelihoods(model, prompt, padded, **options)
    assert ours[1, 2] == 0
    np.testing.assert_allclose(ours.sum(1), dj.log_likelihood(model, prompt, padded, **options), rtol=1e-5)
    for b, length in enumerate(RAGGED.sum(1)):
        alone = dj.token_log_likelihoods(
            model, prompt[b : b + 1, PADS[b] :], answer[b : b + 1, :length],
            masks=masks[:, b : b + 1, :length], cfg_scale=cfg_scale,
        )  # fmt: skip
        np.testing.assert_allclose(ours[b, :length], alone[0], rtol=5e-5)


def test_draws_are_of_each_answers_own_length():
    model, (prompt, answer) = tiny("llada"), texts("llada")
    whole, ragged = (
        dj.log_likelihood(model, prompt, answer, answer_mask=m, draws=6, strata=3, key=jax.random.key(2))
        for m in (np.ones((B, ANSWER), bool), RAGGED)
    )
    np.testing.assert_allclose(whole[0], ragged[0], rtol=1e-5)  # as long as the others' padding
    assert whole[1] != ragged[1]


MASK_ID, VOCAB = tiny("llada").spec.mask_id, tiny("llada").spec.vocab
KEYED = {"key": jax.random.key(0)}
REFUSED = {
    "pass key=jax.random.key": {},
    "draws=10 must .* strata=4: .* Use strata=2, or draws=12": {"draws": 10, "strata": 4, **KEYED},
    "strata=0": {"strata": 0, **KEYED}, "chunk=0": {"chunk": 0, **KEYED},
    r"cfg_scale=-0\.5": {"cfg_scale": -0.5, **KEYED},
    "prompt has 2 sequences, answer has 3": {"answer": np.zeros((3, 2), int)},
    rf"prompt holds id {VOCAB}, outside": {"prompt": np.full((2, 2), VOCAB)},
    rf"answer\[0, 0\] is the mask id {MASK_ID}": {"answer": np.full((2, 2), MASK_ID)},
    "hides every token": {"prompt_mask": np.zeros((2, PROMPT), bool)},
    r"masks have shape \(4, 2, 4\); expected \(draws, 2, 3\)": {"masks": np.ones((4, B, ANSWER + 1), bool)},
    r"masks have shape \(0, 2, 3\)": {"masks": np.ones((0, B, ANSWER), bool)},
    "every draw must mask at least one token": {"masks": np.zeros((4, B, ANSWER), bool)},
    r"answer_mask has shape \(2, 2\); expected \(2, 3\)": {"answer_mask": np.ones((B, 2)), **KEYED},
    "answer_mask of sequence 1 is not right padding": {"answer_mask": [[1, 1, 0], [0, 1, 1]], **KEYED},
    "answer_mask hides every token of sequence 0": {"answer_mask": ~RAGGED[:, ::-1] & False, **KEYED},
    r"masks\[0, 1, 2\] masks a token that answer_mask leaves out": {
        "masks": np.ones((1, B, ANSWER), bool), "answer_mask": RAGGED,
    },
}  # fmt: skip


@pytest.mark.usefixtures("unannotated")
def test_refusals():
    prompt, answer = texts("llada")
    for message, wrong in REFUSED.items():
        wrong = {k: np.array(v) if isinstance(v, list) else v for k, v in wrong.items()}
        with pytest.raises(ValueError, match=message):
            dj.log_likelihood(tiny("llada"), **({"prompt": prompt, "answer": answer} | wrong))
