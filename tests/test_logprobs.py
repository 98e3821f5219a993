"""`logprobs=k`: log-probabilities of tokens in the steps that unmasked them."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.features import logprobs
from dllm_jax.engine.loop import denoise
from tests.models import WIDE, canvas, generated, prompts, tiny

S = samplers
KEY = jax.random.key(5)
OPTIONS = dict(length=8, block=4, widths=WIDE)
LONG = dict(length=12)


@pytest.mark.parametrize(("family", "temperature"), [("llada", 0.0), ("dream", 0.7), ("sdar", 0.7)])
def test_log_probabilities_are_those_of_the_trajectory(family, temperature):
    model = tiny(family)
    # Trajectories have no positions beyond the response: it ends with a block.
    ids, mask = prompts(model, (12, 12) if model.spec.block_size else (12, 6))
    key = dict(key=KEY) if temperature else {}
    sampler = S.Threshold(0.05, temperature=temperature)
    out = dj.generate(
        model, ids, prompt_mask=mask, sampler=sampler, logprobs=0, trace=True, **OPTIONS | LONG, **key
    )
    found = dj.trajectory_log_probs(model, out, prompt_mask=mask, temperature=temperature or 1.0)
    np.testing.assert_allclose(out.logprobs.log_prob, found.log_prob, atol=2e-5)
    np.testing.assert_array_equal(out.logprobs.decoded_at, found.decoded_at)
    assert out.logprobs.top_tokens.shape == (2, 24, 0)
    assert np.count_nonzero(out.logprobs.log_prob) == 24
    if model.spec.block_size:
        with pytest.raises(
            ValueError, match="run ends within a block of sdar, block_size=12: its last 6 pos"
        ):
            dj.trajectory_log_probs(model, out, prompt_mask=np.arange(12) >= [[6]] * 2)


def expected(out: dj.Output, change) -> list[tuple]:
    """Log-probabilities and ranking of each decoded position, from logits that `change` has changed."""
    tokens, rows = np.asarray(out.trace.tokens), []
    for row, position in np.argwhere(np.asarray(out.logprobs.decoded_at) >= 0):
        at = int(out.logprobs.decoded_at[row, position])
        before = jnp.asarray(tokens[at, row][None])
        assert tokens[at, row, position] == 59 != tokens[at + 1, row, position]
        logits = change(
            np.asarray(dj.forward(tiny("llada"), before, before != 57))[0, position], position - 9
        )
        chance = logits - np.logaddexp.reduce(logits)
        token = int(out.tokens[row, position])
        rows.append((chance[token], np.where(np.arange(61) == 59, -np.inf, chance), (row, position)))
    return rows


def test_log_probabilities_are_constrained_tempered_and_filtered_as_drawn():
    allow = [[1, 2, 3, 4]] * 4 + [None] * 4

    def change(logits, i):
        logits = np.where(np.isin(np.arange(61), allow[i]), logits, -np.inf) if allow[i] else logits
        logits = np.where(np.arange(61) == 57, -np.inf, logits) / 0.5
        return np.where(logits >= np.sort(logits)[-3], logits, -np.inf)

    sampler = S.Confidence(temperature=0.5, top_k=3)
    out = generated("llada", sampler=sampler, forbid=[57], allow=allow, logprobs=2, key=KEY)
    for chosen, chance, at in expected(out, change):
        np.testing.assert_allclose(out.logprobs.log_prob[at], chosen, atol=1e-4)
        np.testing.assert_allclose(out.logprobs.top_log_probs[at], np.sort(chance)[::-1][:2], atol=1e-4)
        np.testing.assert_array_equal(out.logprobs.top_tokens[at], np.argsort(-chance)[:2])


def test_every_way_to_ask_has_them_and_nothing_else_changes():
    model = tiny("llada")
    ids, mask = prompts(model, (9, 6))
    options = OPTIONS | dict(policy=policies.DualCache(), sampler=S.Threshold(0.1, cfg_scale=0.5))
    plain = dj.generate(model, ids, prompt_mask=mask, **options)
    stop = [[int(plain.tokens[0, 13])]]
    options |= dict(stop=stop, logprobs=3)
    out = dj.generate(model, ids, prompt_mask=mask, group=1, **options)
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, :13], np.asarray(plain.tokens)[:, :13])
    assert np.asarray(out.logprobs.decoded_at)[0, 13:].tolist() == [-1] * 4, "the stop is filled in"
    assert np.asarray(out.logprobs.top_tokens)[0, 13:].ravel().tolist() == [59] * 12
    *_, last = dj.stream(model, ids, prompt_mask=mask, **options)
    many = dict(dj.generate_many(model, [ids[0], ids[1, 3:]], slots=2, buckets=None, **options))
    for name, array in out.logprobs._asdict().items():
        near = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
        for found in (last.logprobs, last.output.logprobs):
            near(getattr(found, name), array)
        near(getattr(many[0].logprobs, name)[0], array[0])
        near(getattr(many[1].logprobs, name)[0], array[1, 3:])
    template = np.concatenate([ids[:1], np.full((1, 4), 59)], axis=1)
    filled = dj.infill(model, template, logprobs=1)
    best = np.asarray(filled.logprobs.top_tokens)[0, -4:, 0]
    np.testing.assert_array_equal(np.asarray(filled.tokens)[0, -4:], best)


@pytest.mark.parametrize(("family", "sampler"), [("llada", S.WINO()), ("sdar", S.Edit(0.1, 0.05))])
def test_tokens_that_are_revised_have_their_last_step(family, sampler):
    out = generated(family, sampler=sampler, logprobs=1, length=12, block=12)
    tokens, at = np.asarray(out.trace.tokens), np.asarray(out.logprobs.decoded_at)
    changed = (tokens[1:] != tokens[:-1]) & (tokens[1:] != 59)
    last = np.where(changed.any(0), len(changed) - 1 - np.argmax(changed[::-1], axis=0), -1)
    np.testing.assert_array_equal(at, last)
    assert changed.sum() > 24, "some were revised"
    np.testing.assert_array_equal(np.asarray(out.logprobs.log_prob) < 0, at >= 0)


def test_a_draft_that_skips_steps_counts_those_of_its_sequence():
    before = canvas([[True, True]], step=np.array([1]))
    after = dataclasses.replace(before, tokens=before.tokens.at[0, 0].set(7))
    none = logprobs.LogProbs.none(before, 0)
    of_draft = none._replace(decoded_at=jnp.full((1, 2), 3))
    assert none.add(before, after, of_draft).decoded_at.tolist() == [[1, -1]]


def test_a_program_without_them_computes_none_and_what_is_no_number_is_refused():
    model = tiny("llada")
    ids, mask = prompts(model, (9, 6))
    request = prepare(model, ids, prompt_mask=mask, **OPTIONS)
    with_them = prepare(model, ids, prompt_mask=mask, logprobs=0, **OPTIONS)
    assert with_them.plan.by_name.keys() - request.plan.by_name.keys() == {"logprobs"}
    with mock.patch.object(logprobs, "of_candidates", None):
        denoise.trace(model, request.inputs, request.plan)
        with pytest.raises(TypeError, match="not callable"):
            denoise.trace(model, with_them.inputs, with_them.plan)
    for value, message in ((-1, "of at least 0"), (True, "whole number"), (62, "must be at most the vocab")):
        with pytest.raises(ValueError, match=f"logprobs={value} .*{message}"):
            dj.generate(model, ids, prompt_mask=mask, logprobs=value, **OPTIONS)
