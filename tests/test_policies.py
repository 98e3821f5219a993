"""What `dllm_jax.testing` asks of every policy and sampler, asked of ours; and what the engine owes them all.

Every day each policy runs on one family (`PolicyCase.family`), through `BASIC` and what `FURTHER` names for
it; with --exhaustive through every check, on both families.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.decoding.widths import step_widths
from dllm_jax.testing import POLICY_CHECKS, SAMPLER_CHECKS, check_policy, check_sampler, checks
from dllm_jax.testing.checks import SEVERAL_AT_ONCE, Subject, cache_copies_in_loops
from dllm_jax.testing.runs import assert_same_run, finite, of_sequence
from tests.models import FAMILIES, generated, in_int8, prompts, separate, tiny
from tests.policy_cases import CASES, EVERY, KEY, SAMPLER_CASES, short, suited

p, EXHAUSTIVE = policies, pytest.mark.exhaustive
BASIC = (
    checks.exact_limit,
    checks.batch_mates_change_nothing,
    checks.padding_is_inert,
    checks.one_program_per_setting,
)
FURTHER = {
    checks.reuse_is_exact_while_nothing_changes: (p.DLLMCache, p.ElasticCache),
    checks.widths_change_nothing: (p.DualCache, p.D2Cache),
    checks.separate_layers_decode_as_stacked_ones: (p.ElasticCache,),
    checks.half_precision_decodes_everything: (p.SparseDLLM, p.DKVGreedy),
    checks.guidance_has_streams_of_its_own: (p.Policy, p.EvictPrompt),
    checks.stopping_keeps_the_answer: (p.PrefixCache, p.DKVDecode),
    checks.infilling_fills_the_masks_and_nothing_else: (p.SparseDLLM, p.DKVPD, p.DKVPrefill),
    checks.nothing_leaves_the_device_inside: (p.DualCache, p.DLLMCache, p.ElasticCache),
}


def test_every_policy_of_the_library_is_tested():
    assert {type(policy) for policy in policies.ALL} == {policies.Policy, *CASES}
    assert {check for check in POLICY_CHECKS if check not in BASIC} == {*FURTHER, COPIES}


def by_day(type_: type, family: str):
    """Marks what runs with --exhaustive only: all but the policy's own family."""
    own = CASES[type_].family if type_ in CASES else "llada"
    return () if family == own else EXHAUSTIVE


POLICIES = [
    pytest.param(policy, family, id=f"{short(policy)}-{family}", marks=by_day(type(policy), family))
    for policy in EVERY
    for family in FAMILIES
]


@pytest.mark.parametrize(("policy", "family"), POLICIES)
def test_policy(policy, family, request):
    every_day = (*BASIC, *(check for check, types in FURTHER.items() if type(policy) in types))
    asked = [check for check in POLICY_CHECKS if check is not COPIES]
    case = CASES.get(type(policy))
    known = (
        {}
        if case is None
        else dict(limit=case.limit, limit_options=case.limit_layout, lossless=case.lossless)
    )
    check_policy(
        policy, **known, sampler=suited(policy, SEVERAL_AT_ONCE), families=(family,),
        checks=asked if request.config.getoption("exhaustive") else every_day,
    )  # fmt: skip


EXPERTS_EVERY_DAY = p.DualCache, p.SparseDLLM


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, id=short(policy), marks=() if type(policy) in EXPERTS_EVERY_DAY else EXHAUSTIVE)
        for policy in EVERY
    ],
)
def test_policies_run_over_experts(policy):
    """LLaDA-MoE attends as LLaDA does: every policy applies, and knows nothing of what stands behind."""
    case = CASES.get(type(policy))
    known = {} if case is None else dict(limit=case.limit, limit_options=case.limit_layout)
    check_policy(
        policy, **known, sampler=suited(policy, SEVERAL_AT_ONCE), families=("llada-moe",),
        checks=(checks.exact_limit, checks.batch_mates_change_nothing),
    )  # fmt: skip


@EXHAUSTIVE
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", CASES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sampler", [SEVERAL_AT_ONCE, samplers.DreamSchedule(alg="topk_margin")], ids=short)
def test_exact_limits_hold_under_samplers_without_an_even_schedule(sampler, policy, family):
    limit, layout = CASES[policy].limit, CASES[policy].limit_layout
    # Limits of one step per block are those of samplers that decode a block at once.
    if layout["steps"] * layout["block"] == layout["length"] and isinstance(sampler, samplers.Threshold):
        sampler = samplers.Threshold(0.0)
    run = lambda policy: generated(family, policy, sampler=suited(limit, sampler), key=KEY, **layout)
    assert_same_run(run(limit).trace, run(policies.Policy()).trace)


def by_day_but(case, type_: type):
    """The marks of a test that takes one policy every day."""
    return case.marks if isinstance(case.values[0], type_) else EXHAUSTIVE


COPIES = checks.no_copy_of_the_cache_inside_the_loop
COPIED_EVERY_DAY = {(p.DualCache, False), (p.ElasticCache, True)}


@pytest.mark.parametrize(
    ("policy", "apart"),
    [
        pytest.param(
            policy, apart, id=f"{short(policy)}-{'separate' if apart else 'stacked'}",
            marks=() if (type(policy), apart) in COPIED_EVERY_DAY else EXHAUSTIVE,
        )
        for policy in EVERY
        for apart in (False, True)
    ],
)  # fmt: skip
def test_no_copy_of_the_cache_inside_the_loop(policy, apart, optimised, request):
    """With guidance too if exhaustive; apart from the others, as it compiles as users do."""
    for scale in (0.0, 1.0) if request.config.getoption("exhaustive") else (1.0 * apart,):
        sampler = suited(policy, samplers.Confidence(cfg_scale=scale))
        COPIES(Subject(policy, sampler), apart)


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


SAMPLERS_EVERY_DAY = (checks.only_scored_masks_are_decoded, *BASIC[1:])
UNDER = (policies.Policy(), policies.DualCache(), CASES[policies.D2Cache].policy)


@pytest.mark.parametrize(
    ("sampler", "policy", "family"),
    [
        pytest.param(
            sampler, policy, family, id=f"{i}-{short(sampler)}-{short(policy)}-{family}",
            marks=() if (family, policy) == (FAMILIES[i // 2 % 2], UNDER[i % 2]) else EXHAUSTIVE,
        )
        for i, sampler in enumerate(SAMPLER_CASES)
        for policy in UNDER
        for family in FAMILIES
    ],
)  # fmt: skip
def test_sampler(sampler, policy, family, request):
    """Every day by turns under the first two policies, in one family after the other."""
    asked = SAMPLER_CHECKS if request.config.getoption("exhaustive") else SAMPLERS_EVERY_DAY
    check_sampler(sampler, policies=(policy,), families=(family,), checks=asked)


@pytest.mark.parametrize(
    ("policy", "sampler", "family"),
    [
        pytest.param(
            policy, sampler, family, id=f"{short(policy)}-{i}-{short(sampler)}-{family}",
            marks=() if i == j and i % 3 == 0 and family == FAMILIES[i % 2] else EXHAUSTIVE,
        )
        for j, policy in enumerate(EVERY)
        for i, sampler in enumerate(SAMPLER_CASES)
        for family in FAMILIES
    ],
)  # fmt: skip
def test_nothing_is_left_masked(policy, sampler, family):
    """Dream's schedules decode more in the last step than in the others, uneven ones more in the first."""
    run = lambda: generated(family, policy, (9, 9), block=8, steps=5, sampler=sampler, key=KEY)
    if suited(policy, sampler) != sampler and not isinstance(sampler, samplers.RandomOrder):
        with pytest.raises(ValueError, match="use RandomOrder"):
            run()
    else:
        assert not (np.asarray(run().tokens) == tiny(family).spec.mask_id).any()


@pytest.mark.parametrize(
    ("policy", "family"),
    [pytest.param(*case.values, id=case.id, marks=by_day_but(case, p.DualCache)) for case in POLICIES],
)
def test_int8_matrices_decode_alike_in_both_forms_and_near_the_original(policy, family):
    """And not as the original, bit by bit: else nothing would have been int8."""
    model, sampler = tiny(family), suited(policy, samplers.Confidence())
    run = lambda model: generated(model, policy, (9, 7), length=12, sampler=sampler, key=KEY)
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


def test_prefix_cache_computes_the_suffix_and_dual_cache_the_block():
    prefix, dual = (
        generated(policy=policy, lengths=(9, 9), length=12).trace.computed
        for policy in (policies.PrefixCache(), policies.DualCache())
    )
    position = np.arange(9 + 12)
    for step in range(12):
        start = 9 + step // 4 * 4
        full = step % 4 == 0
        np.testing.assert_array_equal(prefix[step, 0], full | (position >= start))
        np.testing.assert_array_equal(dual[step, 0], full | ((position >= start) & (position < start + 4)))


def test_the_exact_decoder_stores_nothing():
    spec = tiny("llada").spec
    layout = dj.Layout(prompt=4, response=8, block=4, steps=8)
    assert not jax.tree.leaves(policies.Policy().init(spec, layout, 2, jnp.float32))
    dense = policies.DualCache().init(spec, layout, 2, jnp.bfloat16)
    assert (
        sum(a.nbytes for a in jax.tree.leaves(dense))
        == 2 * 2 * spec.layers * 2 * 12 * spec.kv_heads * spec.head
    )


@pytest.mark.parametrize(
    ("policy", "family"),
    [pytest.param(*case.values, id=case.id, marks=by_day_but(case, p.D2Cache)) for case in POLICIES],
)
def test_the_bucket_changes_nothing(policy, family):
    model = tiny(family)
    prompt, mask = prompts(model, (9, 6))
    options = dict(sampler=suited(policy, samplers.Confidence()), key=KEY, trace=True, length=8, block=4)
    run = lambda buckets: dj.generate(
        model, prompt, prompt_mask=mask, policy=policy, buckets=buckets, **options
    )
    plain, other = run(None), run(Ladder((4, 16)))
    real = np.pad(mask, ((0, 0), (0, 8)), constant_values=True)  # no padding
    np.testing.assert_array_equal(plain.tokens, other.tokens)
    np.testing.assert_array_equal(plain.trace.tokens, other.trace.tokens)
    np.testing.assert_array_equal(plain.trace.computed & real, other.trace.computed & real)
    np.testing.assert_array_equal(plain.stats.computed, other.stats.computed)


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
