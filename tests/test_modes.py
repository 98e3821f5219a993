"""JAX's stricter modes change nothing: results are the same bit by bit, for every policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import samplers
from dllm_jax.decoding.loop import denoise
from dllm_jax.decoding.request import prepare
from tests.models import prompts, tiny
from tests.policy_cases import EVERY, KEY, SAMPLER_CASES, short, suited

TRACED = {
    "x64": lambda: jax.enable_x64(True),
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
}
MODES = TRACED | {
    "no NaN": lambda: jax.debug_nans(True),
    "no leaks": jax.checking_leaks,
    "no transfers": lambda: jax.transfer_guard("disallow"),
}


@pytest.mark.diagonal(every=2)
@pytest.mark.parametrize("mode", TRACED)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_every_policy_is_traced_in_strict_modes(policy, mode):
    model = tiny("dream")
    prompt, mask = prompts(model, (9, 6))
    sampler = suited(policy, samplers.Confidence(temperature=0.7, cfg_scale=0.5))
    options = dict(prompt_mask=mask, length=8, block=4, policy=policy, sampler=sampler, key=KEY, trace=True)
    with MODES[mode]():
        request = prepare(model, prompt, **options)
        traced = denoise.trace(model, request.inputs, request.plan)
    assert {leaf.dtype for leaf in jax.tree.leaves(traced.out_info)} == {
        jnp.dtype(name) for name in ("int32", "float32", "bool")
    }


@pytest.mark.diagonal(every=13, start=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampler", SAMPLER_CASES, ids=short)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_modes_change_nothing(policy, sampler, mode):
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 6))
    sampler = suited(policy, sampler)
    options = dict(prompt_mask=mask, length=8, block=4, policy=policy, sampler=sampler, key=KEY, trace=True)
    usual = dj.generate(model, prompt, **options)
    with MODES[mode]():
        strict = dj.generate(model, prompt, **options)
    same = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype == np.float32)
    assert jax.tree.all(jax.tree.map(lambda a, b: same(np.asarray(a), np.asarray(b)), usual, strict))


@pytest.mark.parametrize("mode", MODES)
def test_likelihoods_passes_and_buckets_in_strict_modes(mode):
    model = tiny("dream")
    prompt, mask = prompts(model, (9, 6))
    prompt, answer = jax.device_put((prompt.astype(np.int32), prompt[:, :3]))

    def results():
        passes = dj.forward(model, prompt), dj.hidden_states(model, prompt)
        score = dj.log_likelihood(model, prompt, answer, prompt_mask=mask, draws=16, key=KEY, cfg_scale=0.5)
        ladder = dj.buckets.Ladder((12,))
        out = dj.generate(model, prompt, prompt_mask=mask, length=4, buckets=ladder, stop_at_eos=True)
        return passes, score, out

    usual = results()
    with MODES[mode]():
        strict = results()
    for ours, want in zip(jax.tree.leaves(strict), jax.tree.leaves(usual), strict=True):
        assert ours.dtype == want.dtype
        np.testing.assert_array_equal(ours, want)
