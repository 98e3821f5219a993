"""Every policy as a program: purity, one compilation, no copies; stopping, infilling and buckets with it."""

import dataclasses
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.decoding.loop import denoise
from dllm_jax.decoding.plan import Inputs, Plan
from dllm_jax.decoding.widths import step_widths
from tests.models import FAMILIES, separate, tiny
from tests.policy_cases import EVERY, KEY, WIDE, suited
from tests.programs import compilations
from tests.test_policies import SEVERAL_AT_ONCE, prompts, short

OPTIONS = dict(length=8, block=4)


def lowered(policy, sampler, batch=2, layout=None, apart=False):
    """The generation, traced for abstract arguments; `apart` for separate layers."""
    layout = layout or dj.Layout(prompt=24, response=16, block=4, steps=16)
    model = jax.eval_shape(separate if apart else lambda model: model, tiny("llada"))
    sampler = suited(policy, sampler)
    noise = jax.eval_shape(lambda: samplers.KeyNoise(jax.random.split(KEY, batch))) if sampler.draws else None
    plan = Plan(policy, sampler, layout, step_widths(policy, model.spec, layout))
    tokens = jax.ShapeDtypeStruct((batch, layout.length), jnp.int32)
    valid = jax.ShapeDtypeStruct((batch, layout.length), bool)
    return denoise.trace(model, Inputs(tokens, valid, noise), plan), model.spec, layout


@pytest.mark.rotate(every=8)
@pytest.mark.parametrize("sampler", [samplers.Threshold(0.9), samplers.Confidence(cfg_scale=1.0)], ids=short)
@pytest.mark.parametrize("policy", EVERY, ids=short)
@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "separate"])
@pytest.mark.parametrize("batch", [1, 2])
def test_no_copy_of_the_cache_inside_the_loop(policy, sampler, batch, apart, optimised):
    """Cache-sized `copy` ops in the optimised HLO stand only outside of loop bodies (the initial zeros)."""
    traced, spec, layout = lowered(policy, sampler, batch, apart=apart)
    streams = 2 if sampler.cfg_scale else 1
    # As users compile: conftest.py has turned MLIR emitters off.
    text = traced.lower().compile(compiler_options={"xla_cpu_use_fusion_emitters": True}).as_text()
    cache = jax.eval_shape(lambda: policy.init(spec, layout, batch * streams, jnp.float32))
    if apart:
        cache = jax.eval_shape(lambda cache: cache.separate(), cache)
    stores = {a.shape for a in jax.tree.leaves(cache) if a.dtype == jnp.float32 and a.ndim > 2}
    assert bool(stores) == policy.reuses
    for store in stores:
        shape = f"f32[{','.join(map(str, store))}]"
        assert shape in text, "the cache is not where this test looks for it"
        assert not cache_copies_in_loops(text, shape)


def cache_copies_in_loops(text: str, shape: str) -> list[str]:
    """`copy` instructions of the shape in any computation but the entry."""
    found, computation = [], ""
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.rstrip().endswith("{"):
            computation = line
        if re.search(rf"= {re.escape(shape)}\S* copy(-start)?\(", line) and not computation.startswith(
            "ENTRY"
        ):
            found.append(line.strip())
    return found


def test_the_copy_counter_finds_a_copy():
    """Guards the test above: a `cond` with two writing branches is known to copy on jax 0.10."""
    text = """
%body (p: f32[2,2]) -> f32[2,2] {
  %copy.1 = f32[2,2]{1,0} copy(%p)
}
ENTRY %main (p: f32[2,2]) -> f32[2,2] {
  %copy.2 = f32[2,2]{1,0} copy(%p)
}
"""
    assert len(cache_copies_in_loops(text, "f32[2,2]")) == 1


@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_nothing_leaves_the_device_inside(policy):
    traced, _, _ = lowered(policy, samplers.Threshold(0.9))
    names = primitives(traced.jaxpr.jaxpr)
    assert "while" in names
    assert not [n for n in names if "callback" in n or n in ("outfeed", "infeed", "device_put")]


def primitives(jaxpr) -> set[str]:
    """Names of all primitives in a jaxpr and everything it calls."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            names |= primitives(inner)
    return names


@pytest.mark.rotate(every=6)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_one_compilation_per_configuration(policy):
    model = tiny("llada")
    prompt, _ = prompts(model, (7,))
    run = lambda policy, seed, **changes: dj.generate(
        model,
        prompt + seed,
        length=4,
        block=2,
        policy=policy,
        sampler=suited(policy, samplers.Confidence(**changes)),
        key=jax.random.key(seed),
        widths=WIDE,
    )
    before = denoise._cache_size()
    run(policy, 0)
    assert denoise._cache_size() == before + 1
    with compilations() as compiled:
        run(dataclasses.replace(policy), 1)
    assert not compiled
    run(policy, 0, logits_eos_inf=True)
    assert denoise._cache_size() == before + 2


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("policy", EVERY, ids=short)
@pytest.mark.parametrize("sampler", [samplers.Confidence(), SEVERAL_AT_ONCE], ids=short)
def test_stopping_at_eos_keeps_the_answer(policy, sampler):
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 6, 8), seed=4)
    sampler = suited(policy, sampler)
    options = dict(prompt_mask=mask, length=16, block=4, policy=policy, sampler=sampler, key=KEY, widths=WIDE)
    usual = dj.generate(model, prompt, **options)
    # make the token that appears early in sequence 0 the end-of-text
    eos = int(usual.tokens[0, 9 + 5])
    model = model.replace_spec(eos_id=eos)
    full = dj.generate(model, prompt, **options)
    stopped = dj.generate(model, prompt, stop_at_eos=True, **options)
    assert stopped.stats.nfe[0] < full.stats.nfe[0]
    for sequence in range(3):
        answer = np.asarray(full.tokens[sequence, 9:]).tolist()
        end = answer.index(eos) + 1 if eos in answer else len(answer)
        np.testing.assert_array_equal(stopped.tokens[sequence, 9 : 9 + end], answer[:end])
        assert stopped.stats.answer[sequence] == full.stats.answer[sequence] == end - (eos in answer)
    assert not np.any(np.asarray(stopped.tokens) == model.spec.mask_id)


@pytest.mark.rotate(every=3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", policies.ALL, ids=short)
def test_infill_fills_masks_anywhere_and_nothing_else(policy, family):
    model = tiny(family)
    template, _ = prompts(model, (12, 12))
    template[0, [0, 3, 7]] = template[1, [5, 6]] = model.spec.mask_id
    sampler = suited(policy, samplers.Confidence())
    filled = np.asarray(dj.infill(model, template, policy=policy, sampler=sampler, key=KEY).tokens)
    hole = template == model.spec.mask_id
    np.testing.assert_array_equal(filled[~hole], template[~hole])
    assert not (filled == model.spec.mask_id).any()


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_the_bucket_changes_nothing(policy, family):
    model = tiny(family)
    prompt, mask = prompts(model, (9, 6))
    options = dict(sampler=suited(policy, samplers.Confidence()), key=KEY, trace=True, **OPTIONS)
    run = lambda buckets=None: dj.generate(
        model, prompt, prompt_mask=mask, policy=policy, buckets=buckets, **options
    )
    plain = run()
    for other in (run(Ladder((9, 32))), run(Ladder((4, 16)))):
        np.testing.assert_array_equal(plain.tokens, other.tokens)
        np.testing.assert_array_equal(plain.trace.tokens, other.trace.tokens)
        np.testing.assert_array_equal(plain.trace.computed & real(mask), other.trace.computed & real(mask))
        np.testing.assert_array_equal(plain.stats.computed, other.stats.computed)


def real(mask) -> np.ndarray:
    """Where the canvas is no padding."""
    return np.pad(mask, ((0, 0), (0, OPTIONS["length"])), constant_values=True)


def test_which_static_widths_a_generation_compiles():
    """Full steps are no width, as they compute any set in place; a layer of one's own keeps its widest."""
    layout = dj.Layout(prompt=1024, response=256, block=32, steps=256)
    widths = lambda policy, override=None: step_widths(policy, tiny("llada").spec, layout, override)
    assert widths(policies.Policy()) == ()
    assert widths(policies.DualCache()) == widths(policies.SparseDLLM()) == (32,)
    assert widths(policies.DLLMCache()) == widths(policies.MaskKV()) == (256,)
    assert widths(policies.D2Cache()) == (40, 160, 320, 640)
    assert widths(policies.DualCache(), (8, 1280)) == (8,)
    assert widths(policies.SparseDLLM(), (8, 1280)) == (8, 32)
    assert widths(policies.DualCache(), (10**6,)) == ()
    assert widths(LayerOfItsOwn())[-1] == 1280, "nothing is known of when its full steps are whole"


class LayerOfItsOwn(policies.Policy):
    """The default widths hold the canvas."""

    def select(self, cache, canvas):
        return canvas.due(2) | canvas.block

    def layer(self, layer, x, cache, rows, canvas):
        return super().layer(layer, x, cache, rows, canvas)
