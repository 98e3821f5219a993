"""Responses that lead up to given text."""

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import samplers
from dllm_jax.testing import check_policy, checks
from dllm_jax.testing.runs import assert_same_run
from tests.models import FAMILIES, families, random_tokens, tiny
from tests.policy_cases import CACHED, CASES, matrix, suited
from tests.test_prompt_embeds import prompts

SUFFIX = [3, 9, 4]


@families("dream")
def test_a_response_before_a_suffix_is_a_template_with_masks_before_it(family):
    model = tiny(family)
    prompt = random_tokens(model.spec, 1, 6, seed=5)
    ours = dj.generate(model, prompt, suffix=SUFFIX, length=8, trace=True)
    template = np.concatenate([prompt, [[model.spec.mask_id] * 8], [SUFFIX]], axis=1)
    theirs = dj.infill(model, template, trace=True)
    assert_same_run(ours.trace, theirs.trace, computed=True)
    np.testing.assert_array_equal(np.asarray(ours.tokens)[0, -3:], SUFFIX)
    assert (ours.stats.decoded_tokens[0], ours.stats.nfe[0]) == (8, 8)
    without = dj.generate(model, prompt, length=8, trace=True)
    assert not np.allclose(without.trace.score[0, 0, 6:14], ours.trace.score[0, 0, 6:14])


@pytest.mark.exhaustive
@matrix("policy, family", CACHED, FAMILIES, today=[])
def test_policies_are_exact_in_their_limits(policy, family):
    case = CASES[type(policy)]
    options = dict(limit=case.limit, limit_options=case.limit_layout | dict(suffix=SUFFIX))
    sampler = suited(policy, samplers.Threshold(0.25))
    check_policy(policy, **options, sampler=sampler, families=(family,), checks=(checks.exact_limit,))


def test_ends_of_text_and_stops_are_not_looked_for_in_a_suffix():
    model = tiny("llada")
    ids, mask = prompts(model)
    eos = model.spec.eos_id
    options = dict(prompt_mask=mask, length=8, block=4, suffix=[eos, 7])
    never = samplers.Confidence(suppress_tokens=(eos, 7))
    plain = dj.generate(model, ids, sampler=never, **options)
    assert plain.stats.answer_tokens.tolist() == [8, 8]
    for more in (dict(stop_at_eos=True), dict(stop=[[7]])):
        np.testing.assert_array_equal(
            dj.generate(model, ids, sampler=never, **more, **options).tokens, plain.tokens
        )
    own = dj.generate(model, ids, sampler=never, **(options | dict(suffix=[[eos, 7], [5, 6]])))
    np.testing.assert_array_equal(np.asarray(own.tokens)[:, -2:], [[eos, 7], [5, 6]])
    first = int(plain.tokens[0, 9])
    cut = dj.generate(model, ids, sampler=never, stop=[[first]], **options)
    np.testing.assert_array_equal(np.asarray(cut.tokens)[0, 9:], [eos] * 8 + [eos, 7])


def test_values_that_are_no_suffix_are_refused():
    for suffix, message in (
        ([61], "suffix holds id 61, outside"),
        ([59], r"suffix\[0, 0\] is the mask id 59"),
        ([], "suffix has shape"),
        ([[1], [2], [3]], r"suffix has shape \(3, 1\); expected one text, or one for each of 2 prompts"),
    ):
        with pytest.raises(ValueError, match=message):
            dj.generate(tiny("llada"), [[1, 2], [3, 4]], length=4, suffix=suffix)
    with pytest.raises(ValueError, match="suffix=4 must be below response=4"):
        dj.Layout(prompt=1, response=4, block=2, steps=2, suffix=4)
