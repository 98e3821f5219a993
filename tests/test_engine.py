"""The denoising loop as a program: purity, one compilation, stopping, statistics."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from tests.models import FAMILIES, tiny
from tests.test_policies import prompts
from tests.test_policies_as_programs import lowered


def test_the_vocabulary_meets_only_candidate_rows():
    """No array of the program has canvas x vocabulary elements: only positions of the block are projected."""
    traced, spec, layout = lowered(policies.Policy(), samplers.Confidence())
    text = traced.lower().as_text()
    assert f"tensor<2x{layout.block}x{spec.vocab}xf32>" in text
    assert f"{layout.length}x{spec.vocab}x" not in text
    assert f"{layout.response}x{spec.vocab}x" not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_is_jittable(family):
    model = tiny(family)
    prompt, mask = prompts(model, (9, 5))
    options = dict(
        length=8, block=4, policy=policies.DualCache(), sampler=samplers.Confidence(temperature=1.0)
    )
    run = lambda model, prompt, mask, key: dj.generate(model, prompt, prompt_mask=mask, key=key, **options)
    key = jax.random.key(3)
    inside = jax.jit(run)(model, jnp.asarray(prompt), jnp.asarray(mask), key)
    np.testing.assert_array_equal(inside.tokens, run(model, prompt, mask, key).tokens)


def test_parameters_have_gradients():
    model = tiny("llada")
    tokens = jnp.asarray(prompts(model)[0])
    loss = lambda m: dj.forward(m, tokens).astype(jnp.float32).var()
    grads = jax.grad(loss)(model)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(grads.params))


def test_statistics_of_a_dual_cache_run():
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5))
    out = dj.generate(
        model, prompt, prompt_mask=mask, length=8, block=4, steps=4, policy=policies.DualCache()
    )
    np.testing.assert_array_equal(out.stats.nfe, [4, 4])
    np.testing.assert_array_equal(out.stats.refreshes, [2, 2])
    np.testing.assert_array_equal(out.stats.computed, [2 * 17 + 2 * 4, 2 * 13 + 2 * 4])
    np.testing.assert_allclose(out.stats.cache_ratio, [1 - 42 / 68, 1 - 34 / 52], rtol=1e-6)
    np.testing.assert_array_equal(out.stats.decoded, [8, 8])


def test_the_trace_is_the_history():
    model = tiny("dream")
    prompt, _ = prompts(model)
    out = dj.generate(model, prompt, length=8, block=4, sampler=samplers.Threshold(0.25), trace=True)
    tokens = np.asarray(out.trace.tokens)
    assert len(tokens) == int(out.trace.steps) + 1 == len(out.trace.computed) + 1
    assert (tokens[0, :, 9:] == model.spec.mask_id).all()
    np.testing.assert_array_equal(tokens[-1], out.tokens)
    known = tokens != model.spec.mask_id
    assert (known[1:] >= known[:-1]).all(), "a decoded token was masked again"
    kept = (tokens[1:] == tokens[:-1]) | ~known[:-1]
    assert kept.all(), "a decoded token changed"


@pytest.mark.parametrize("family", FAMILIES)
def test_infilling_a_padded_row_equals_the_row_alone(family):
    """Also where padding holds the mask id, and where the first real position is a mask (for Dream)."""
    model = tiny(family)
    template, mask = prompts(model, (10, 6))
    template[0, [2, 5]] = template[1, [0, 1, 2, 3, 4, 7]] = model.spec.mask_id
    batch = dj.infill(model, template, token_mask=mask, trace=True)  # as many steps as real masks: 2
    alone = dj.infill(model, template[1:, 4:], steps=2, trace=True)
    assert batch.trace is not None
    assert alone.trace is not None
    np.testing.assert_array_equal(batch.trace.tokens[:, 1, 4:], alone.trace.tokens[:, 0])
    assert batch.stats.decoded[1] == alone.stats.decoded[0] == 6
