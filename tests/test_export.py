"""Generations as serialized programs (`jax.export`), and in JAX's stricter modes: the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax import policies as p
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.loop import denoise
from dllm_jax.nn.exported import CHECKS
from tests.models import FAMILIES, in_int8, prompts, separate, tiny
from tests.policy_cases import EVERY, EXHAUSTIVE, KEY, SAMPLER_CASES, matrix, suited

pytest.importorskip("flatbuffers", reason="jax.export serializes with it")

PLATFORMS = ("cpu", "tpu", "cuda")
FORMS = {"stacked": lambda model: model, "separate": separate, "int8": in_int8}


@pytest.mark.parametrize("form", FORMS if EXHAUSTIVE else ["separate"])
def test_an_exported_generation_gives_what_it_gives_here(form):
    """Written for three platforms at once, read back and run; the model, its statistics and trace with it."""
    model = FORMS[form](tiny("dream"))
    prompt, _ = prompts(model, (5, 5))
    run = jax.jit(
        lambda model, ids: dj.generate(model, ids, length=4, block=2, policy=policies.DualCache(), trace=True)
    )
    ids = prompt.astype(np.int32)
    data = export.export(run, platforms=PLATFORMS, disabled_checks=CHECKS)(model, ids).serialize()
    program = export.deserialize(data)
    assert program.platforms == PLATFORMS
    ours, want = program.call(model, ids), run(model, ids)
    assert isinstance(ours, dj.Output)
    for exported, leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(exported, leaf, rtol=1e-5)  # scores; all else is whole numbers


@matrix("policy, family", EVERY, FAMILIES, today=[(policies.D2Cache, "dream")])
def test_every_policy_is_exported(policy, family):
    model = tiny(family)
    prompt, _ = prompts(model, (5, 5))
    sampler = suited(policy, dj.samplers.Confidence(temperature=0.5))
    run = jax.jit(
        lambda model, ids, key: (
            dj.generate(model, ids, length=4, block=2, policy=policy, sampler=sampler, key=key).tokens
        )
    )
    ids = prompt.astype(np.int32)
    exported = export.export(run, platforms=PLATFORMS, disabled_checks=CHECKS)(model, ids, KEY)
    assert export.deserialize(exported.serialize()).platforms == PLATFORMS


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


SOME = [(p.D2Cache, "x64"), (p.MaskKV, "strict dtypes"), (p.ElasticCache, "strict ranks")]


@matrix("policy, mode", EVERY, TRACED, today=SOME)
def test_every_policy_is_traced_in_strict_modes(policy, mode):
    model = tiny("dream")
    prompt, mask = prompts(model, (9, 6))
    sampler = suited(policy, samplers.Confidence(temperature=0.7, cfg_scale=0.5))
    options = dict(prompt_mask=mask, length=8, block=4, policy=policy, sampler=sampler, key=KEY, trace=True)
    with MODES[mode]():
        request = prepare(model, prompt, **options)
        traced = denoise.trace(model, request.inputs, request.plan)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(traced.out_info)}
    assert kinds == {jnp.dtype(name) for name in ("int32", "float32", "bool")}


ONE = (p.DualCache, samplers.Threshold(0.25), "no leaks")


@matrix("policy, sampler, mode", EVERY, SAMPLER_CASES, MODES, today=[ONE])
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


@pytest.mark.parametrize("mode", MODES if EXHAUSTIVE else ["no leaks"])
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
