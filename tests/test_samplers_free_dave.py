"""FreeDave: the answer of the sampler that it wraps in fewer forward passes, and what it refuses."""

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies as P
from dllm_jax import samplers as S
from tests.models import EXHAUSTIVE, frequencies, prompts, tiny

WARM = S.Confidence(temperature=0.7)


class Refreshing(P.DualCache):
    """Renews what it stores within blocks, too, which its base promises not to do."""

    def select(self, cache, canvas):
        return canvas.every_n_steps(2) | super().select(cache, canvas)


# Family, policy, sampler, block, options of FreeDave.
CASES = {
    "dual": ("llada", P.DualCache(), S.Confidence(), 6, {}),
    "eager": ("sdar", P.Policy(), S.Confidence(), None, dict(eager=True, branches=6)),
    "warm": ("dream", P.PrefixCache(), WARM, 6, {}),
    "one branch": ("llada", P.DualCache(), S.Confidence(), 6, dict(branches=1)),
    "no cache": ("llada", P.Policy(), S.Sequential(), 6, dict(branches=3)),
    "threshold": ("llada", P.PrefixCache(), S.Threshold(0.25), 12, dict(branches=8)),
    "random order": ("llada", P.DualCache(), S.RandomOrder(), 6, {}),
    "dream": ("dream", P.DualCache(), S.DreamSchedule(alg_temp=0.3, temperature=0.3), 6, {}),
    "linear": ("rnd1", P.DualCache(), S.Confidence(schedule="linear"), 6, {}),
    "experts": ("llada-moe", P.PrefixCache(), S.PCSampler(frequencies()), 6, {}),
    "blocks": ("sdar", P.DualCache(), S.Dynamic(0.9), None, {}),
    "sub-blocks": ("sdar", P.PrefixCache(), S.CertaintyPrior(), 6, {}),
    "warm eager": ("sdar", P.Policy(), WARM, None, dict(eager=True)),
    "causal": ("nemotron", P.Policy(), S.Confidence(), 6, {}),
}


@pytest.mark.parametrize("case", CASES if EXHAUSTIVE else ["dual", "eager", "warm"])
def test_tokens_are_those_of_the_sampler_alone(case):
    """Random models, unequal prompts, a key for each sequence: the same token in the same step."""
    family, policy, sampler, block, more = CASES[case]
    passes, steps = 0, 0
    for seed in range(3):
        prompt, mask = prompts(tiny(family), (9, 6), seed)
        options = dict(prompt_mask=mask, length=12, block=block, policy=policy, logprobs=0)
        options |= dict(key=jax.random.split(jax.random.key(seed), 2)) if sampler.draws else {}
        alone = dj.generate(tiny(family), prompt, sampler=sampler, **options)
        drafted = dj.generate(tiny(family), prompt, sampler=S.FreeDave(sampler, **more), **options)
        np.testing.assert_array_equal(drafted.tokens, alone.tokens)
        np.testing.assert_array_equal(drafted.logprobs.decoded_at, alone.logprobs.decoded_at)
        np.testing.assert_allclose(drafted.logprobs.log_prob, alone.logprobs.log_prob, atol=1e-4)
        np.testing.assert_array_equal(drafted.stats.sampler_steps, alone.stats.nfe)
        assert (np.asarray(drafted.stats.nfe) <= alone.stats.nfe).all()
        assert (np.asarray(drafted.stats.branches) >= drafted.stats.nfe).all()
        passes, steps = passes + drafted.stats.nfe.sum(), steps + alone.stats.nfe.sum()
    assert passes == steps if more.get("branches") == 1 else passes < steps, "no draft was ever accepted"


@pytest.mark.exhaustive
@pytest.mark.parametrize("ends", [dict(stop_at_eos=True), dict(stop=True)], ids=["eos", "stop"])
def test_steps_that_a_draft_skips_end_an_answer_as_others_do(ends):
    prompt, mask = prompts(tiny("llada"), (9, 6))
    options = dict(prompt_mask=mask, length=24, block=12, policy=P.DualCache())
    plain = np.asarray(dj.generate(tiny("llada"), prompt, **options).tokens)
    model = tiny("llada").replace_spec(eos_id=int(plain[0, -6])) if "stop_at_eos" in ends else tiny("llada")
    options |= dict(stop=[plain[0, -6:-4].tolist()]) if "stop" in ends else ends
    alone = dj.generate(model, prompt, **options)
    drafted = dj.generate(model, prompt, sampler=S.FreeDave(branches=8), **options)
    assert (np.asarray(alone.tokens) != plain).any(), "nothing was stopped"
    np.testing.assert_array_equal(drafted.tokens, alone.tokens)
    np.testing.assert_array_equal(drafted.stats.sampler_steps, alone.stats.nfe)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: S.FreeDave(S.KLASS()), r"sampler=KLASS\(.*\) is not supported by FreeDave: its"),
        (lambda: S.FreeDave(S.WINO()), "is not supported by FreeDave: its decisions do not follow"),
        (lambda: S.FreeDave(S.FreeDave()), "is not supported by FreeDave: its decisions do not follow"),
        (lambda: S.FreeDave(S.Confidence(cfg_scale=0.5)), "by FreeDave: cfg_scale=0.5 runs two streams"),
        (lambda: S.FreeDave(S.Threshold(early_commit=S.EarlyCommit())), "by FreeDave: early_commit decides"),
        (lambda: S.FreeDave(temperature=0.5).drafting, r"Use FreeDave\(Confidence\(temperature=0.5\)\)"),
        (lambda: S.FreeDave(branches=0), "branches=0 must be a whole number"),
    ],
)  # fmt: skip
def test_samplers_that_cannot_be_drafted_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llada", dict(policy=P.DKVDecode()), r"policy=DKVDecode\(.*\) is not supported by FreeDave: drafts"),
        ("sdar", dict(policy=P.SparseDLLM()), r"policy=SparseDLLM\(.*\) is not supported by FreeDave"),
        ("llada", dict(policy=Refreshing()), r"policy=Refreshing\(\) is not supported by FreeDave"),
        ("sdar", dict(policy=P.SubBlockCache()), r"policy=SubBlockCache\(\) is not supported by FreeDave"),
        ("llada", dict(block=dj.Sliding(6)), "block=Sliding.* is not supported by FreeDave: drafts share"),
        ("llada", dict(eager=True), "eager=True is not supported by llada: it attends to later blocks"),
        ("nemotron", dict(eager=True), "eager=True is not supported by nemotron: it has a causal context"),
        ("sdar", dict(eager=True, block=6), "block=6 is not supported with eager=True: .* Use block=12"),
        ("llada", dict(steered=True), "interventions= is not supported by FreeDave: it verifies tokens by"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_drafted_are_refused(family, options, message):
    options, eager = dict(options), options.get("eager", False)
    options.pop("eager", None)
    if options.pop("steered", False):
        options["interventions"] = [dj.Intervention.mask("mlp_output", layers=0)]
    with pytest.raises(ValueError, match=message):
        dj.generate(tiny(family), [[1, 2]], length=12, sampler=S.FreeDave(eager=eager), **options)
