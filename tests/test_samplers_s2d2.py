"""S2D2: its two exact limits, the distribution of what it accepts, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies as P
from dllm_jax import samplers as S
from dllm_jax.samplers.s2d2 import first_run
from tests import refuses
from tests.models import canvas, prompts, random_tokens, tiny

ALWAYS = S.S2D2(on=None)
NEVER = S.S2D2(least=1000, causal_storage=False, threshold=0.3)


@pytest.mark.parametrize(
    ("sampler", "limit", "shifted"),
    [
        (ALWAYS, S.Autoregressive(), False),
        pytest.param(NEVER, S.Dynamic(0.3), False, marks=pytest.mark.exhaustive),
        pytest.param(ALWAYS, S.Autoregressive(), True, marks=pytest.mark.exhaustive),
    ],
)
def test_it_equals_its_limits(sampler, limit, shifted):
    """Autoregressive decoding if it is greedy and stores causally; its drafts if it never verifies."""
    model = tiny("sdar", shifted=shifted)
    prompt, mask = prompts(model, (9, 6))
    options = dict(prompt_mask=mask, length=24)
    found, expected = (dj.generate(model, prompt, sampler=s, **options) for s in (sampler, limit))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    if sampler is NEVER:
        np.testing.assert_array_equal(found.stats.nfe, expected.stats.nfe)


def test_interventions_act_where_no_shadow_verifies():
    """A shifted head verifies a draft by passes over the canvas, as autoregressive decoding computes them."""
    model = tiny("sdar", block_size=4, shifted=True)
    direction = np.random.default_rng(1).standard_normal(model.spec.width).astype(np.float32)
    steering = [dj.Intervention.steer("residual", 3 * direction, layers=1)]
    prompt, mask = prompts(model, (9, 6))
    run = lambda sampler, some: (
        dj.generate(model, prompt, sampler=sampler, interventions=some, prompt_mask=mask, length=12).tokens
    )
    steered = run(ALWAYS, steering)
    np.testing.assert_array_equal(steered, run(S.Autoregressive(), steering))
    assert (steered != run(ALWAYS, ())).any()
    unshifted = dict(length=4, sampler=ALWAYS, interventions=steering)
    refuses("by S2D2: it verifies tokens by a shadow", dj.generate, tiny("sdar"), [[5]], **unshifted)


def test_a_template_is_filled_as_by_its_limit_even_from_its_first_position_on():
    """With a shifted head nothing stands in front of the first mask: it predicts itself, causally."""
    model = tiny("sdar", block_size=4, shifted=True)
    template = random_tokens(model.spec, 2, 14, seed=3)
    template[:, 0] = template[0, [5, 6]] = template[1, [2, 3, 8, 13]] = model.spec.mask_id
    found, expected = (dj.infill(model, template, sampler=s).tokens for s in (ALWAYS, S.Autoregressive()))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.exhaustive
def test_requests_and_ends_are_those_of_a_call_alone():
    model, key = tiny("sdar"), jax.random.key(3)
    sampler = S.S2D2(temperature=0.8, off=-1.0, on=-0.5)
    ids = [np.arange(n) for n in (9, 4, 7)]
    keys = [jax.random.fold_in(key, i) for i in range(3)]
    options = dict(sampler=sampler, length=13)
    plain = [dj.generate(model, [one], key=k, **options) for one, k in zip(ids, keys, strict=True)]
    assert {int(out.stats.nfe[0]) for out in plain} != {13}, "nothing was verified"
    ends = model.replace_spec(eos_id=int(plain[0].tokens[0, -4]))
    found = dict(dj.generate_many(ends, ids, slots=2, key=key, stop_at_eos=True, **options))
    for i, one in enumerate(ids):
        alone = dj.generate(ends, [one], key=keys[i], stop_at_eos=True, **options)
        np.testing.assert_array_equal(found[i].tokens, alone.tokens)
        np.testing.assert_array_equal(found[i].stats.nfe, alone.stats.nfe)


def test_accepted_and_redrawn_tokens_follow_the_verifier():
    """Any p: the kept token has the verifier's distribution, as in speculative sampling."""
    count, vocab = 20_000, 6
    p, q = np.random.default_rng(0).dirichlet(np.full(vocab, 0.7), 2)
    p[-1] = q[-1] = 0  # [MASK], which nobody proposes
    p, q = p / p.sum(), q / q.sum()
    draft = np.random.default_rng(1).choice(vocab, count, p=p)[None]
    at = canvas(np.ones((1, count), bool))
    at = dataclasses.replace(at, spec=dataclasses.replace(at.spec, mask_id=vocab - 1))
    log = lambda of: np.log(of, where=of > 0, out=np.full(vocab, -np.inf)).astype(np.float32)
    logits = lambda of: np.broadcast_to(log(of), (1, count, vocab))
    index, score = np.arange(count, dtype=np.int32)[None], np.zeros((1, count), np.float32)
    drafted, verifier = (S.Candidates(index, draft.astype(np.int32), score, logits(of)) for of in (p, q))
    noise = S.KeyNoise(jax.random.split(jax.random.key(0), 1))
    verify = jax.jit(S.S2D2(temperature=1.0).verify)
    accepted, instead = verify(drafted, logits(p), verifier, at, noise)
    kept = np.where(accepted, draft, instead)[0]
    np.testing.assert_allclose(np.bincount(kept, minlength=vocab) / count, q, atol=0.015)
    overlap = np.minimum(p, q).sum()
    np.testing.assert_allclose(np.mean(accepted), overlap, atol=0.015)


def test_the_first_run_of_masks():
    offered = jnp.asarray([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]], bool)
    index = jnp.asarray([[4, 5, 6, 7], [4, 6, 7, 9], [4, 5, 6, 9], [4, 5, 6, 7]])
    expected = [[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(first_run(offered, index), np.asarray(expected, bool))


def test_incompatible_options_are_refused_by_name():
    refuses("off=1.0 must be at most on=0.0", S.S2D2, off=1.0)
    refuses("early_commit=.* is not supported by S2D2", S.S2D2, early_commit=S.EarlyCommit())
    run = lambda family, **more: dj.generate(tiny(family), [[1, 2]], length=12, sampler=S.S2D2(), **more)
    for family, more, message in (
        ("llada", {}, "does not support llada: it needs blocks"),
        ("nemotron", {}, "does not support nemotron: .* or SelfSpeculation"),
        ("sdar", dict(policy=P.DualCache()), r"policy=DualCache\(\) is not supported by S2D2: each step"),
        ("sdar", dict(logprobs=1), "logprobs=1 is not supported by S2D2: a token is drafted"),
        ("sdar", dict(interventions=[dj.Intervention.mask("mlp_output", layers=0)]), "by S2D2: it verifies"),
    ):
        refuses(message, run, family, **more)
