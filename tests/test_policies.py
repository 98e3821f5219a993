"""Properties every cache policy must have, over `policies.ALL` x both families x samplers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from tests.models import FAMILIES, cast, frequencies, in_int8, separate, tiny
from tests.policy_cases import CACHED, CASES, EVERY, KEY, WIDE, suited
from tests.traces import assert_same_run, of_sequence, partial_steps

SEVERAL_AT_ONCE = samplers.Threshold(0.25)  # blocks of 4 take one to four steps, sequences differ
SAMPLERS = (samplers.Confidence(), SEVERAL_AT_ONCE, samplers.DreamSchedule(alg="topk_margin"))
SAMPLER_CASES = (
    samplers.Confidence(),
    samplers.RandomOrder(),
    samplers.CertaintyPrior(),
    samplers.CertaintyPrior(tokens_per_step=2),
    samplers.Factor(),
    samplers.EBSampler(3.0),
    samplers.PCSampler(frequencies()),
    samplers.KLASS(confidence_threshold=0.05, divergence=0.1),
    SEVERAL_AT_ONCE,
    samplers.DreamSchedule(),
    samplers.DreamSchedule(alg="origin"),
)


def test_every_policy_of_the_library_is_tested():
    assert {type(p) for p in policies.ALL} == {policies.Policy, *CASES}


def prompts(model: dj.Model, lengths=(9, 9), seed=0) -> tuple[np.ndarray, np.ndarray]:
    """Random prompts, left-padded with the end-of-text id, and their mask."""
    rng = np.random.default_rng(seed)
    width = max(lengths)
    ids = rng.integers(0, model.spec.vocab - 20, (len(lengths), width))
    mask = np.arange(width) >= width - np.asarray(lengths)[:, None]
    return np.where(mask, ids, model.spec.eos_id), mask


def short(value) -> str:
    return type(value).__name__


@pytest.mark.rotate(every=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=short)
@pytest.mark.parametrize("policy", CACHED, ids=short)
def test_exact_limit_reproduces_the_exact_decoder(policy, sampler, family):
    limit, layout = CASES[type(policy)].limit, CASES[type(policy)].limit_layout
    one_step_per_block = layout["steps"] * layout["block"] == layout["length"]
    if isinstance(sampler, samplers.Threshold) and one_step_per_block:  # everything is sure enough
        sampler = samplers.Threshold(0.0)
    model = tiny(family)
    prompt, mask = prompts(model, (9, 6))
    options = dict(prompt_mask=mask, sampler=suited(policy, sampler), key=KEY, trace=True, widths=WIDE)
    run = lambda p: dj.generate(model, prompt, policy=p, **options, **layout)
    ours, exact = run(limit), run(policies.Policy())
    assert_same_run(ours.trace, exact.trace)


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", CACHED, ids=short)
def test_a_cached_policy_differs_from_exact_outside_its_limit(policy, family):
    """Guards the limit test: if caching never changed anything, equality above would prove nothing."""
    model = tiny(family)
    prompt, _ = prompts(model)
    options = dict(sampler=suited(policy, samplers.Confidence()), key=KEY, trace=True, widths=WIDE)
    run = lambda p: dj.generate(model, prompt, length=16, block=8, policy=p, **options)
    ours, exact = run(policy), run(policies.Policy())
    assert np.abs(finite(ours.trace.score) - finite(exact.trace.score)).max() > 1e-5


@pytest.mark.rotate(every=6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampler", SAMPLERS[:2], ids=short)
@pytest.mark.parametrize("policy", EVERY, ids=short)
@pytest.mark.parametrize("sequence", [0, 1], ids=["longest", "padded"])
def test_a_sequence_of_a_batch_equals_the_sequence_alone(sequence, policy, sampler, family):
    model = tiny(family)
    prompt, mask = prompts(model, (9, 4), seed=1)
    options = dict(length=8, block=4, policy=policy, sampler=suited(policy, sampler), trace=True)
    keys = jax.random.split(KEY, 2)
    batch = dj.generate(model, prompt, prompt_mask=mask, key=keys, **options)
    width = mask[sequence].sum()
    alone = dj.generate(
        model, prompt[sequence : sequence + 1, -width:], key=keys[sequence : sequence + 1], **options
    )
    assert_same_run(of_sequence(batch.trace, sequence, width + 8), alone.trace, computed=True)
    for ours, single in zip(batch.stats, alone.stats, strict=True):
        np.testing.assert_allclose(ours[sequence], single[0], rtol=1e-6)
    assert bool(partial_steps(batch)) == policy.reuses


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", CACHED, ids=short)
def test_widths_change_nothing(policy, family):
    model = tiny(family)
    prompt, _ = prompts(model)
    run = lambda widths: dj.generate(
        model,
        prompt,
        length=12,
        block=4,
        policy=policy,
        sampler=suited(policy, SEVERAL_AT_ONCE),
        key=KEY,
        trace=True,
        widths=widths,
    )
    own, narrow, many = run(None), run((2,)), run((4, 5, 9, 21))
    assert partial_steps(own)
    for other in (narrow, many):
        assert_same_run(other.trace, own.trace, computed=True)
        np.testing.assert_allclose(finite(own.trace.score), finite(other.trace.score), atol=1e-5)
        np.testing.assert_array_equal(own.stats.computed, other.stats.computed)


@pytest.mark.rotate(every=8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_separate_layers_decode_as_stacked_ones(policy, family):
    prompt, mask = prompts(tiny(family), (9, 7))
    runs = [
        dj.generate(
            model,
            prompt,
            prompt_mask=mask,
            length=12,
            block=4,
            policy=policy,
            sampler=suited(policy, SEVERAL_AT_ONCE),
            key=KEY,
            trace=True,
            widths=WIDE,
        )
        for model in (tiny(family), separate(tiny(family)))
    ]
    assert_same_run(runs[1].trace, runs[0].trace, computed=True)
    for separate_layers, stacked in zip(runs[1].stats, runs[0].stats, strict=True):
        np.testing.assert_allclose(separate_layers, stacked, rtol=1e-6)


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_int8_matrices_decode_alike_in_both_forms_and_near_the_original(policy, family):
    """And not as the original, bit by bit: else nothing would have been int8."""
    model = tiny(family)
    prompt, mask = prompts(model, (9, 7))
    options = dict(prompt_mask=mask, length=12, block=4, key=KEY, trace=True, policy=policy, widths=WIDE)
    run = lambda m: dj.generate(m, prompt, sampler=suited(policy, samplers.Confidence()), **options)
    stacked, apart, floats = map(run, (in_int8(model), separate(in_int8(model)), model))
    assert_same_run(apart.trace, stacked.trace, computed=True)
    first = [finite(out.trace.score)[0] for out in (stacked, floats)]
    assert 1e-5 < np.abs(first[0] - first[1]).max() < 0.2


@dataclasses.dataclass(frozen=True)
class DueInTurns(policies.Policy):
    """Sequences of a batch are due in different steps, which the width does not provide for."""

    def select(self, cache, canvas):
        return canvas.block_begins | canvas.due(3) | canvas.sources(canvas.block)

    def widths(self, spec, layout):
        return (layout.block,)


class DueInTurnsByItsOwnLayer(DueInTurns):
    """The same with a layer of its own, as an evicting policy has."""

    def layer(self, layer, x, cache, rows, canvas):
        return super().layer(layer, x, cache, rows, canvas)


@pytest.mark.parametrize("policy", [DueInTurns(), DueInTurnsByItsOwnLayer()], ids=short)
def test_a_sequence_that_is_due_leaves_its_batch_mates_alone(policy):
    """Also where `widths` does not hold what it selects: nobody computes more than alone."""
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 4))
    options = dict(length=8, block=4, policy=policy, sampler=SEVERAL_AT_ONCE, trace=True)
    batch = dj.generate(model, prompt, prompt_mask=mask, **options)
    assert batch.stats.nfe[0] != batch.stats.nfe[1], "sequences must differ in their number of steps"
    for sequence, width in enumerate(mask.sum(axis=1)):
        alone = dj.generate(model, prompt[sequence : sequence + 1, -width:], **options)
        assert_same_run(of_sequence(batch.trace, sequence, width + 8), alone.trace, computed=True)
        np.testing.assert_array_equal(batch.stats.computed[sequence], alone.stats.computed[0])


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_padding_is_inert(policy, family):
    """Another pad id whose embedding is NaN changes nothing."""
    model = tiny(family)
    prompt, mask = prompts(model, (9, 5))
    options = dict(policy=policy, sampler=suited(policy, samplers.Confidence()), key=KEY, trace=True)
    run = lambda m, p: dj.generate(m, p, prompt_mask=mask, length=8, block=4, **options)
    plain = run(model, prompt)
    poison = min(set(range(model.spec.vocab)) - set(np.unique(plain.tokens).tolist()))
    embed = model.params["embed"].at[poison].set(jnp.nan)
    poisoned = dataclasses.replace(model, params={**model.params, "embed": embed})
    other = run(poisoned, np.where(mask, prompt, poison))
    np.testing.assert_array_equal(plain.trace.tokens[..., 9:], other.trace.tokens[..., 9:])
    np.testing.assert_allclose(finite(plain.trace.score), finite(other.trace.score), atol=1e-6)


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", [c.lossless for c in CASES.values() if c.lossless], ids=short)
def test_reuse_is_exact_when_nothing_changed(policy, family):
    """A step that decodes nothing leaves the canvas as it was, so cached K/V are what new ones would be."""
    model = tiny(family)
    prompt, _ = prompts(model)
    options = dict(length=4, block=4, steps=4, trace=True, widths=WIDE)
    out = dj.generate(model, prompt, policy=policy, sampler=Frozen(), **options)
    exact = dj.generate(model, prompt, sampler=Frozen(), **options)
    np.testing.assert_allclose(finite(out.trace.score), finite(exact.trace.score), atol=2e-6)
    assert out.stats.computed.sum() < exact.stats.computed.sum()


class Frozen(samplers.Confidence):
    """Never decodes anything."""

    def transfer(self, score, index, canvas, noise):
        return jnp.zeros(score.shape, bool)


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_bfloat16_runs_and_commits_everything(policy, family):
    model = cast(tiny(family), jnp.bfloat16)
    prompt, mask = prompts(model, (9, 5))
    sampler = suited(policy, samplers.Confidence())
    options = dict(policy=policy, sampler=sampler, key=KEY, widths=WIDE)
    out = dj.generate(model, prompt, prompt_mask=mask, length=8, block=4, **options)
    assert not np.any(np.asarray(out.tokens) == model.spec.mask_id)


@pytest.mark.rotate(every=6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampler", SAMPLER_CASES, ids=short)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_nothing_is_left_masked(policy, sampler, family):
    """Dream's schedules decode more in the last step than in the others, uneven ones more in the first."""
    model = tiny(family)
    prompt, _ = prompts(model)
    options = dict(policy=policy, sampler=sampler, key=KEY, widths=WIDE)
    run = lambda: dj.generate(model, prompt, length=8, steps=5, **options)
    if suited(policy, sampler) != sampler and not isinstance(sampler, samplers.RandomOrder):
        with pytest.raises(ValueError, match="use RandomOrder"):
            run()
    else:
        assert not (np.asarray(run().tokens) == model.spec.mask_id).any()


@dataclasses.dataclass(frozen=True)
class OneAtATime(policies.Policy):
    """Offers the leftmost mask only."""

    def eligible(self, canvas):
        return canvas.eligible & (jnp.cumsum(canvas.eligible, axis=1) <= 1)


@pytest.mark.parametrize("sampler", [samplers.Confidence(), samplers.DreamSchedule()], ids=short)
def test_a_block_goes_on_after_its_schedule_until_it_is_done(sampler):
    """A schedule of two steps per block wants two positions at a time and is offered one."""
    model = tiny("llada")
    prompt, _ = prompts(model)
    out = dj.generate(model, prompt, length=8, block=4, steps=4, policy=OneAtATime(), sampler=sampler)
    assert not (np.asarray(out.tokens) == model.spec.mask_id).any()
    np.testing.assert_array_equal(out.stats.nfe, 8)
    usual = dj.generate(model, prompt, length=8, block=4, steps=4, sampler=sampler)
    np.testing.assert_array_equal(usual.stats.nfe, 4)


@pytest.mark.rotate(every=13)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", EVERY, ids=short)
def test_guidance_goes_with_every_policy(policy, family):
    """With cfg_scale the streams have the rule in common but not the cache; scale 0 gives the plain run."""
    model = tiny(family)
    prompt, _ = prompts(model)
    run = lambda scale: dj.generate(
        model,
        prompt,
        length=8,
        block=4,
        policy=policy,
        sampler=suited(policy, samplers.Confidence(cfg_scale=scale)),
        key=KEY,
        trace=True,
        widths=WIDE,
    )
    plain, faint, strong = run(0.0), run(1e-12), run(3.0)
    # l_u + (w + 1)(l_c - l_u) at w = 0 is l_c up to rounding
    np.testing.assert_allclose(finite(plain.trace.score), finite(faint.trace.score), atol=1e-5)
    if (
        suited(policy, SAMPLERS[0]) != SAMPLERS[0]
    ):  # scores of a random order are no outputs of the model, candidates are
        assert not np.array_equal(plain.trace.proposed, strong.trace.proposed)
    else:
        assert np.abs(finite(plain.trace.score)[0] - finite(strong.trace.score)[0]).max() > 1e-3


def test_prefix_cache_computes_the_suffix_and_dual_cache_the_block():
    model = tiny("llada")
    prompt, _ = prompts(model)
    shape = dict(length=12, block=4, trace=True)
    prefix = dj.generate(model, prompt, policy=policies.PrefixCache(), **shape).trace.computed
    dual = dj.generate(model, prompt, policy=policies.DualCache(), **shape).trace.computed
    position = np.arange(9 + 12)
    for step in range(12):
        start = 9 + step // 4 * 4
        full = step % 4 == 0
        np.testing.assert_array_equal(prefix[step, 0], full | (position >= start))
        np.testing.assert_array_equal(dual[step, 0], full | ((position >= start) & (position < start + 4)))


def test_shifted_models_compute_the_positions_that_predict():
    model = tiny("dream")
    prompt, _ = prompts(model)
    computed = dj.generate(
        model, prompt, length=8, block=4, policy=policies.DualCache(), trace=True
    ).trace.computed
    np.testing.assert_array_equal(np.flatnonzero(computed[1, 0]), [8, 9, 10, 11])


def test_the_exact_decoder_stores_nothing():
    spec = tiny("llada").spec
    layout = dj.Layout(prompt=4, response=8, block=4, steps=8)
    assert not jax.tree.leaves(policies.Policy().init(spec, layout, 2, jnp.float32))
    dense = policies.DualCache().init(spec, layout, 2, jnp.bfloat16)
    assert (
        sum(a.nbytes for a in jax.tree.leaves(dense))
        == 2 * 2 * spec.layers * 2 * 12 * spec.kv_heads * spec.head
    )


def finite(score) -> np.ndarray:
    return np.nan_to_num(np.asarray(score), neginf=0.0)
