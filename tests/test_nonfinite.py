"""Logits that are not finite end their sequence, never another, and are told as the user wants."""

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.engine.stats import NonFiniteWarning
from dllm_jax.eval.run.answering import NOT_FINITE
from dllm_jax.eval.run.likelihoods import Likelihood
from dllm_jax.eval.run.runner import EvalRequest, Runner
from dllm_jax.eval.run.settings import Decoding, LanguageModel
from dllm_jax.testing.runs import assert_same_run, assert_same_stats, of_sequence
from tests.models import FAMILIES, frequencies, tiny
from tests.policy_cases import EVERY, KEY, matrix, suited

POISON = 50  # a token that no random prompt holds
KINDS = (
    samplers.Threshold(0.9), samplers.Confidence(cfg_scale=1.5), samplers.RandomOrder(),
    samplers.CertaintyPrior(tokens_per_step=2), samplers.Factor(top_p=0.9), samplers.EBSampler(2.0),
    samplers.PCSampler(frequencies()), samplers.KLASS(confidence_threshold=0.05, divergence=0.1),
    samplers.DreamSchedule(alg="entropy", alg_temp=0.5),
)  # fmt: skip


def poisoned(family: str, value=jnp.nan, token: int = POISON) -> dj.Model:
    """A model one of whose tokens has an embedding that is not finite."""
    model = tiny(family)
    embed = model.params["embed"].at[token].set(value)
    return dataclasses.replace(model, params={**model.params, "embed": embed})


@matrix("policy, sampler, family", EVERY, KINDS, FAMILIES, today=[(policies.DualCache, KINDS[4], "dream")])
def test_a_sequence_without_finite_logits_ends_alone(policy, sampler, family):
    model = poisoned(family)
    options = dict(length=8, block=2, policy=policy, sampler=suited(policy, sampler), trace=True)
    keys = jax.random.split(KEY, 2)
    with pytest.warns(NonFiniteWarning, match=r"sequences \[0\] of 2 ended early"):
        batch = dj.generate(model, [[POISON, 1], [2, 3]], key=keys, **options)
    alone = dj.generate(model, [[2, 3]], key=keys[1:], **options)
    assert_same_run(of_sequence(batch.trace, 1, 10), alone.trace, computed=True)
    assert_same_stats(batch.stats, alone.stats, sequence=1)
    np.testing.assert_array_equal(batch.stats.finite, [False, True])
    assert (batch.stats.nfe[0], batch.stats.decoded_tokens[0], batch.stats.answer_tokens[0]) == (1, 0, 0)
    assert (np.asarray(batch.tokens)[0, 2:] == model.spec.mask_id).all()
    assert not (np.asarray(batch.tokens)[1] == model.spec.mask_id).any()


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_sequence_that_decodes_its_poison_keeps_what_it_had(value):
    """The token that it decodes second has an embedding that is not finite: the third step sees it."""
    plain = dj.generate(tiny("llada"), [[1, 2, 3]], length=6, trace=True)
    states = itertools.pairwise(np.asarray(plain.trace.tokens)[:, 0])
    order = [np.flatnonzero(before != after)[0] for before, after in states]
    token = int(plain.tokens[0, order[1]])
    assert token not in np.asarray(plain.trace.tokens[1, 0]), "it must not be there before"
    model = poisoned("llada", value, token)
    out = dj.generate(model, [[1, 2, 3]], length=6, stop_at_eos=True, nonfinite="ignore")
    assert (out.stats.nfe[0], out.stats.decoded_tokens[0], bool(out.stats.finite[0])) == (3, 2, False)
    np.testing.assert_array_equal(out.tokens[0], plain.trace.tokens[2, 0])


def test_a_head_that_is_not_finite_is_seen_whatever_the_sampler_looks_at():
    """One token's logit is infinite, for every position; random order looks at no logit."""
    model = tiny("llada")
    head = model.params["head"].at[7].set(jnp.inf)
    model = dataclasses.replace(model, params={**model.params, "head": head})
    for sampler in (samplers.RandomOrder(), samplers.Confidence(logits_eos_inf=True, top_k=3)):
        out = dj.generate(model, [[1, 2]], length=2, sampler=sampler, key=KEY, nonfinite="ignore")
        assert (bool(out.stats.finite[0]), out.stats.decoded_tokens[0]) == (False, 0)


def test_the_host_warns_raises_or_says_nothing(unannotated):
    model, prompt = poisoned("llada"), [[2, 3], [POISON, 1]]
    with pytest.warns(NonFiniteWarning, match=r"sequences \[1\] of 2"):
        dj.generate(model, prompt, length=2)
    with pytest.raises(FloatingPointError, match=r"sequences \[1\] of 2.*still masked \(stats.finite\)"):
        dj.generate(model, prompt, length=2, nonfinite="raise")
    with warnings.catch_warnings(action="error"):
        quiet = dj.generate(model, prompt, length=2, nonfinite="ignore")
    np.testing.assert_array_equal(quiet.stats.finite, [True, False])
    with pytest.raises(ValueError, match="nonfinite='no' must be one of 'warn', 'raise', 'ignore'"):
        dj.generate(model, prompt, length=2, nonfinite="no")
    inside = jax.jit(lambda m, ids: dj.generate(m, ids, length=2, nonfinite="raise").stats.finite)
    np.testing.assert_array_equal(inside(model, np.asarray(prompt)), [True, False])
    padded = poisoned("llada", token=tiny("llada").spec.eos_id)  # the padding of a bucket has no logit
    sampler, ladder = samplers.Confidence(logits_eos_inf=True), dj.buckets.Ladder((6,))
    assert dj.generate(padded, [[2, 3]], length=2, buckets=ladder, sampler=sampler).stats.finite[0]
    template = [[POISON, model.spec.mask_id]]
    with pytest.warns(NonFiniteWarning):
        dj.infill(model, template)
    with pytest.raises(FloatingPointError):
        dj.infill(model, template, nonfinite="raise")


def test_sequences_over_a_mesh_end_one_by_one():
    """Three sequences on two devices: one of padding alone is added, which is none that failed."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    model, prompt = poisoned("llada"), np.asarray([[2, 3], [POISON, 1], [4, 5]])
    options = dict(length=4, block=2, policy=policies.DualCache(), sampler=samplers.Threshold(0.5))
    one = dj.generate(model, prompt, nonfinite="ignore", **options)
    with jax.set_mesh(mesh), pytest.warns(NonFiniteWarning, match=r"sequences \[1\] of 3"):
        several = dj.generate(model, prompt, **options)
    np.testing.assert_array_equal(one.tokens, several.tokens)
    np.testing.assert_array_equal(several.stats.finite, [True, False, True])


class Letters:
    """A tokenizer of numbers."""

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


def test_an_evaluation_records_such_a_sequence_as_a_failure():
    lm = LanguageModel("tiny", poisoned("llada"), Letters(), "weights")
    runner = Runner(lm, Decoding(batch=2, bucket=4, block=2, length=4))
    entries = runner.run([EvalRequest("bad", (POISON, 1), 4), EvalRequest("good", (2, 3), 4)])
    assert [entry["error"] for entry in entries] == [NOT_FINITE, None]
    assert entries[0]["answer"] is None
    pairs = [((2, POISON), (4,)), ((2, 3), (4,))]
    entries = Likelihood(lm, Decoding(batch=2, bucket=4), draws=2, strata=2).run(pairs)
    assert [entry["error"] for entry in entries] == [NOT_FINITE, None]
