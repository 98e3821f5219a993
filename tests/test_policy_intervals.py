"""Which steps compute the prompt: every policy at two values of each interval, by the trace of a run."""

import dataclasses

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies as p
from dllm_jax.testing import tiny

RANDOM = dict(sampler=dj.samplers.RandomOrder(), key=jax.random.key(0))
SDAR = dict(family="sdar", block=4)
EVERY = list(range(12))
# Twelve steps of one token, in two blocks of six unless options say otherwise; steps are counted from 0.
STEPS = [
    (p.Policy(), EVERY, {}),
    (p.PrefixCache(), [0, 6], {}),
    (p.DualCache(), [0, 6], {}),
    (p.SlidingCache(window=4), [0, 4, 8], dict(block=dj.Sliding(4))),
    (p.DKVDecode(refresh_every=2, delay=1), [0, 1, 2, 4, 6, 7, 8, 10], {}),
    (p.DKVDecode(refresh_every=5, delay=1), [0, 1, 5, 6, 7, 11], {}),
    (p.DKVDecode(refresh_every=None, delay=2), [0, 1, 2, 6, 7, 8], {}),
    (p.DKVGreedy(refresh_every=2), [0, 2, 4, 6, 8, 10], RANDOM),
    (p.DKVGreedy(refresh_every=5), [0, 5, 6, 11], RANDOM),
    (p.DKVPrefill(), [0], {}),
    (p.DKVPD(refresh_every=2, delay=1), [0], {}),
    (p.DKVPD(refresh_every=5, delay=2), [0], {}),
    (p.DLLMCache(prompt_every=2, response_every=3), [0, 2, 4, 6, 8, 10], {}),
    (p.DLLMCache(prompt_every=5, response_every=2), [0, 5, 10], {}),
    (p.SPACache(prompt_every=2, response_every=3), [0, 2, 4, 6, 8, 10], {}),
    (p.SPACache(prompt_every=5, response_every=2), [0, 5, 10], {}),
    (p.MaskKV(prompt_every=2, response_every=3, budget=2), [0, 2, 4, 6, 8, 10], {}),
    (p.MaskKV(prompt_every=5, response_every=2, budget=2), [0, 5, 10], {}),
    # The first four steps, whatever the interval, and those that are full; steps count from 1 there.
    (p.DyLLM(full_steps=1, prompt_every=3), [0, 1, 2, 3, 5, 8, 11], {}),
    (p.DyLLM(full_steps=1, prompt_every=1000), [0, 1, 2, 3], {}),
    (p.DyLLM(full_steps=6, prompt_every=4), [0, 1, 2, 3, 4, 5, 7, 11], {}),
    (p.ESDLLM(prompt_every=2, block_every=3), [0, 2, 4, 6, 8, 10], {}),
    (p.ESDLLM(prompt_every=5, block_every=2), [0, 5, 10], {}),
    (p.ESDLLM(prompt_every=1000, block_every=3), [0], {}),
    (p.SparseDLLM(delay=1), [0, 1, 6, 7], {}),
    (p.SparseDLLM(delay=2), [0, 1, 2, 6, 7, 8], {}),
    (p.WindowDiffusion(window=8, active=4, refresh_every=2), [0, 2, 4, 6, 8, 10], {}),
    (p.WindowDiffusion(window=8, active=4, refresh_every=5), [0, 5, 10], {}),
    (p.ElasticCache(window=4), [0], {}),
    (p.D2Cache(), [0], {}),
    (p.EvictPrompt(budget=2), [0, 6], {}),
    (p.SuffixDropout(), [0, 6], {}),
    (p.SubBlockCache(), [0], SDAR | dict(block=2)),
    (p.DelayedCache(), [0], SDAR),
    (p.FOCUS(), [0], SDAR),
    (p.MAGE(), [0], SDAR),
]


@pytest.mark.parametrize(("policy", "steps", "options"), STEPS, ids=[type(row[0]).__name__ for row in STEPS])
def test_these_steps_compute_the_prompt(policy, steps, options):
    options = dict(family="llada", length=12, block=6, steps=12, widths=(10**6,), trace=True) | options
    model = tiny(options.pop("family"))
    prompt = [list(range(4, 4 + (model.spec.context.size or 4)))]  # of whole blocks
    out = dj.generate(model, prompt, policy=policy, **options)
    computed = np.asarray(out.trace.computed)[:, 0, : len(prompt[0])].all(axis=1)
    assert np.flatnonzero(computed).tolist() == steps


def test_every_policy_is_in_the_table_with_two_values_of_each_interval():
    values = {}
    for policy, _, _ in STEPS:
        for field in dataclasses.fields(policy):
            if field.name.endswith("_every") or field.name in ("delay", "full_steps"):
                values.setdefault((type(policy), field.name), set()).add(getattr(policy, field.name))
        values.setdefault(type(policy), set())
    assert {type(policy) for policy in p.ALL} <= values.keys()
    assert len(values) > 30
    assert not [name for name, several in values.items() if isinstance(name, tuple) and len(several) < 2]
