"""Generations as serialised programs (`jax.export`), with the model as an argument."""

import jax
import numpy as np
import pytest
from jax import export

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.nn.exported import CHECKS
from tests.models import in_int8, prompts, separate, tiny
from tests.policy_cases import EVERY, KEY, short, suited

pytest.importorskip("flatbuffers", reason="jax.export serialises with it")

PLATFORMS = ("cpu", "tpu", "cuda")
FORMS = {"stacked": lambda model: model, "separate": separate, "int8": in_int8}


@pytest.mark.parametrize("form", FORMS)
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


@pytest.mark.diagonal(every=6, start=1)
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("policy", EVERY, ids=short)
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
