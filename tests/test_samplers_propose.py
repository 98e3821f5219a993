"""From logits to candidates, confidences and the positions that are decoded, against numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import samplers
from dllm_jax.samplers import (
    CertaintyPrior,
    Confidence,
    DreamSchedule,
    RandomOrder,
    RecordedNoise,
    Threshold,
    scores,
)
from dllm_jax.xla.reductions import argmax
from tests import numpy_sampler as plain
from tests.models import candidates, canvas, frequencies, spec

B, C, V = 2, 6, 61
SPEC = spec("llada")
MASK, EOS, EOT = SPEC.mask_id, SPEC.eos_id, SPEC.eot_id
INDEX = jnp.tile(jnp.arange(C, dtype=jnp.int32), (B, 1))
CANVAS = canvas(np.ones((B, C)))

propose = jax.jit(lambda s, logits, noise: s.propose(logits, INDEX, CANVAS, noise)[1:3], static_argnums=0)


def random_logits(seed: int) -> np.ndarray:
    """Peaked at random; the special tokens are likely, so that rules about them matter."""
    logits = 2.5 * np.random.default_rng(seed).standard_normal((B, C, V))
    logits[..., [MASK, EOS, EOT]] += 4
    return logits.astype(np.float32)


def random_noise(seed: int) -> RecordedNoise:
    rng = np.random.default_rng(seed)
    token, order = rng.gumbel(size=(1, B, C, V)), rng.random((1, B, C))
    return RecordedNoise(jnp.asarray(token, jnp.float32), jnp.asarray(order, jnp.float32))


CASES = [
    Confidence(), Confidence(alg="margin", top_p=0.9), Confidence(alg="entropy", top_k=5),
    Confidence(alg="margin", allow_mask_token=True), Confidence(temperature=0.7, top_p=0.8, top_k=9),
    Confidence(logits_eos_inf=True, confidence_eos_eot_inf=True),
    Confidence(temperature=1.3, confidence_eos_eot_inf=True),
    Confidence(top_k=1, confidence_eos_eot_inf=True),
    Confidence(alg="margin", top_k=1, confidence_eos_eot_inf=True),
    Confidence(alg="entropy", top_k=2, confidence_eos_eot_inf=True), RandomOrder(),
    RandomOrder(temperature=0.5), Threshold(0.9, top_k=1),
    CertaintyPrior(alg="entropy", temperature=0.5),
    samplers.PCSampler(frequencies(), clip=1.0, confidence_eos_eot_inf=True),
    DreamSchedule(alg="entropy", temperature=0.4, top_p=0.9),
    DreamSchedule(alg="topk_margin", temperature=2.0, top_k=4),
    DreamSchedule(alg="maskgit_plus", temperature=0.4, allow_mask_token=True),
    DreamSchedule(alg="origin", temperature=1.0),
]  # fmt: skip


@pytest.mark.parametrize("sampler", CASES, ids=str)
def test_candidates_and_confidences(sampler):
    for seed in range(3):
        logits, noise = random_logits(seed), random_noise(seed)
        token, score = propose(sampler, logits, noise)
        each = zip(logits.reshape(B * C, V), noise.token.reshape(B * C, V), noise.order.ravel(), strict=True)
        expected = [plain.candidate(sampler, SPEC, *at) for at in each]
        np.testing.assert_array_equal(np.ravel(token), [token for token, _ in expected])
        np.testing.assert_allclose(np.ravel(score), [score for _, score in expected], atol=3e-5)


@pytest.mark.parametrize("sampler", CASES[:10] + CASES[14:18], ids=str)
def test_confidences_are_never_infinite_or_nan(sampler):
    """A candidate must stay one: -inf means that there is none, and NaN is never chosen."""
    for extreme in (0.0, 80.0, 1e4):
        logits = np.zeros((B, C, V), np.float32)
        for c, token in enumerate((MASK, EOS, EOT, 0)):
            logits[:, c, token] = extreme
        logits[:, 4, [EOS, EOT]] = extreme
        token, score = propose(sampler, logits, random_noise(0))
        assert np.isfinite(score).all()
        assert ((token >= 0) & (token < V)).all()


MASK_WINS = np.zeros((B, C, V), np.float32)
MASK_WINS[..., MASK] = 9
MASK_WINS[..., 17] = 3


def test_the_mask_token_is_chosen_only_if_allowed_and_its_probability_counts():
    filters = {}, {"top_k": 1}, {"top_p": 0.5}, {"top_p": 0.5, "top_k": 1}
    for kind, filtered in itertools.product((Confidence, Threshold, DreamSchedule), filters):
        token, _ = propose(kind(**filtered), MASK_WINS, None)
        assert (token == 17).all()
        token, _ = propose(kind(allow_mask_token=True, **filtered), MASK_WINS, None)
        assert (token == MASK).all()
    _, score = propose(Confidence(), MASK_WINS, None)
    np.testing.assert_allclose(score, plain.softmax(MASK_WINS[0, 0])[17], rtol=1e-4)
    _, alone = propose(Confidence(top_k=1), MASK_WINS, None)
    assert (alone == 0).all()  # everything but the mask was filtered out: a candidate, but the last


def test_equal_logits_take_the_lowest_id_and_half_precision_is_widened():
    token, score = propose(Confidence(), jnp.zeros((B, C, V)), None)
    assert (token == 0).all()
    np.testing.assert_allclose(score, 1 / V, rtol=1e-5)
    logits = jnp.asarray(random_logits(0), jnp.bfloat16)
    _, score = propose(Confidence(), logits, None)
    assert score.dtype == jnp.float32
    np.testing.assert_array_equal(score, propose(Confidence(), logits.astype(jnp.float32), None)[1])


@pytest.mark.parametrize("sampler", [Confidence(temperature=0.5), RandomOrder()], ids=str)
def test_without_noise_nothing_is_drawn(sampler):
    with pytest.raises(ValueError, match="neither a key nor a recording"):
        sampler.propose(jnp.zeros((B, C, V)), INDEX, CANVAS, None)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_draws_from_the_tempered_softmax(temperature):
    """Pearson's statistic over 4000 draws of one distribution with 6 outcomes."""
    count, law = 4000, np.asarray([2.0, 1.0, 0.5, 0.0, -0.5, -1.0], np.float32)
    logits = np.full((1, count, V), -np.inf, np.float32)
    logits[..., :6] = law
    noise = samplers.KeyNoise(jax.random.split(jax.random.key(1), 1))
    c, index = canvas(np.ones((1, count))), np.arange(count, dtype=np.int32)[None]
    draw = jax.jit(lambda sampler, *given: sampler.propose(*given).token)
    token = draw(Confidence(temperature=temperature), logits, index, c, noise)
    seen = np.bincount(np.asarray(token)[0], minlength=V)
    expected = count * plain.softmax(law / temperature)
    assert seen[6:].sum() == 0
    assert ((seen[:6] - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: 0.1 % level
    untempered = count * plain.softmax(law)
    if temperature != 1:
        assert ((seen[:6] - untempered) ** 2 / untempered).sum() > 100


survivors = jax.jit(scores.survivors, static_argnums=(1, 2))


def one(row) -> jax.Array:
    return jnp.asarray([[row]], jnp.float32)


def members(keep) -> set[int]:
    return set(np.flatnonzero(np.asarray(keep)[0, 0]).tolist())


@pytest.mark.parametrize(
    ("probabilities", "top_p", "expected"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.6, {0, 1}),  # 1 crosses, and stays
        ([0.5, 0.25, 0.125, 0.125], 0.4, {0}),
        ([0.5, 0.25, 0.125, 0.125], 0.5, {0, 1}),  # only mass beyond top_p ends it
        ([0.125, 0.25, 0.125, 0.5], 0.8, {0, 1, 3}),  # equals: the lower id first
        ([0.97, 0.01, 0.01, 0.01], 1e-6, {0}),  # the best always survives
    ],
)
def test_nucleus_examples(probabilities, top_p, expected):
    assert members(survivors(one(np.log(probabilities)), top_p, None)) == expected


@pytest.mark.parametrize(
    ("row", "top_k", "expected"),
    [
        ([3, 1, 2, 1, 0], 3, {0, 1, 2, 3}),  # tied with the third
        ([1, 1, 1, 1, 1], 1, {0, 1, 2, 3, 4}), ([3, 1, 2, 1, 0], 1, {0}),
        ([3, 1, 2, 1, 0], 9, {0, 1, 2, 3, 4}),
    ],
)  # fmt: skip
def test_top_k_examples(row, top_k, expected):
    assert members(survivors(one(row), None, top_k)) == expected


def decoded(sampler, confidences) -> int:
    """How many masks of these confidences a step decodes; further ones have none."""
    score = np.full((1, 9), -np.inf, np.float32)
    score[0, : len(confidences)] = confidences
    return int(np.sum(transferred(sampler, score, canvas(np.ones(score.shape)))))


@jax.jit
def transferred(sampler, score, canvas) -> jax.Array:
    return sampler.transfer(candidates(score, jnp.arange(score.shape[1])[None]), canvas, None)


@pytest.mark.parametrize("threshold", [0.9, 0.0, 1.0])
def test_a_confidence_equal_to_the_threshold_is_accepted(threshold):
    assert decoded(Threshold(threshold), [threshold] * 8) == 8


@pytest.mark.parametrize(
    ("confidences", "factor", "count"),
    [
        ([0.9, 0.9, 0.9, 0.9], 0.5, 3),  # (n + 1) 0.1 < 0.5 for n < 4
        ([0.9, 0.9, 0.9, 0.9], 0.4, 2),
        ([0.5, 0.5], 1.5, 1),  # 3 * 0.5 = 1.5 is not below 1.5
        ([0.99, 0.5], 1.0, 1),  # a first failure at the last candidate is a failure
        ([1.0, 1.0, 1.0], 0.01, 3),  # and all are taken if none fails
        ([0.1], 0.5, 1),
    ],
)
def test_factor_examples(confidences, factor, count):
    assert decoded(samplers.Factor(factor), confidences) == count


def test_the_likeliest_of_many_tokens_is_the_first_of_equal_ones():
    """CPUs find it in two passes; a row of NaN has some token, one of -inf the first."""
    logits = np.random.default_rng(0).integers(-40, 40, (2, 3, 1500)).astype(np.float32)
    logits[0, 1], logits[1, 2, 7] = -np.inf, np.nan
    found = np.array(jax.jit(argmax)(logits))
    assert 0 <= found[1, 2] < 1500
    found[1, 2] = np.argmax(logits[1, 2])
    np.testing.assert_array_equal(found, np.argmax(logits, axis=-1))
