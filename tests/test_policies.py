"""What `dllm_jax.testing` asks of every policy and sampler, asked of ours; and what the engine owes them all.

Each policy runs on one family (`PolicyCase.family`), through `BASIC` and, with --full, what `FURTHER` names
for it; with --exhaustive through every check, on both families.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.engine.step import computed_rows
from dllm_jax.engine.widths import Variant, exceeds, step_widths
from dllm_jax.testing import POLICY_CHECKS, SAMPLER_CHECKS, check_policy, check_sampler, checks
from dllm_jax.testing.checks import SEVERAL_AT_ONCE, Subject, cache_copies_in_loops
from dllm_jax.testing.runs import assert_same_run
from tests.models import FAMILIES, canvas, generated, prompts, tiny
from tests.policy_cases import CASES, EVERY, EXHAUSTIVE, KEY, SAMPLER_CASES, leaves_out, matrix, short, suited

p = policies
BASIC = (
    checks.exact_limit, checks.batch_mates_change_nothing, checks.padding_is_inert,
    checks.one_program_per_setting,
)  # fmt: skip
FURTHER = {
    # Of what counts positions or ranks them: the others take sets of the canvas, which has its own tests.
    checks.alone_as_in_a_batch: (
        p.D2Cache,
        p.DKVGreedy,
        p.DyLLM,
        p.ESDLLM,
        p.EvictPrompt,
        p.MaskKV,
        p.SPACache,
        p.SparseDLLM,
        p.SuffixDropout,
        p.WindowDiffusion,
    ),
    checks.reuse_is_exact_while_nothing_changes: (p.DLLMCache,),
    checks.widths_change_nothing: (p.DualCache, p.D2Cache),
    checks.separate_layers_decode_as_stacked_ones: (p.DKVDecode,),
    checks.half_precision_decodes_everything: (p.DKVGreedy,),
    checks.guidance_has_streams_of_its_own: (p.EvictPrompt,),
    checks.stopping_keeps_the_answer: (p.PrefixCache,),
    checks.drafts_change_nothing: (p.PrefixCache, p.DualCache),
    checks.infilling_fills_the_masks_and_nothing_else: (p.DKVPD,),
    checks.nothing_leaves_the_device_inside: (p.DualCache,),
}


def test_every_policy_of_the_library_is_tested():
    assert {type(policy) for policy in policies.ALL} == {policies.Policy, *CASES}
    assert {check for check in POLICY_CHECKS if check not in BASIC} == {*FURTHER, COPIES}


# Every day each policy in its own family.
OWN = {kind: CASES[kind].family if kind in CASES else "llada" for kind in map(type, EVERY)}
# These attend as LLaDA does: every policy applies, and knows nothing of what follows.
ALIKE = (*FAMILIES, "llada-moe", "a2d-qwen3", "rnd1")


def check(policy, family, asked):
    case, known = CASES.get(type(policy)), {}
    if isinstance(policy, p.ESDLLM):  # whose rows leave: guidance is refused
        asked = [check for check in asked if check is not checks.guidance_has_streams_of_its_own]
    if case is not None:
        known = dict(limit=case.limit, limit_options=case.limit_layout, lossless=case.lossless)
    check_policy(policy, **known, sampler=suited(policy, SEVERAL_AT_ONCE), families=(family,), checks=asked)


@matrix("policy, family", EVERY, ALIKE, today=OWN.items())
def test_policy(policy, family):
    check(policy, family, BASIC)
    # What all heads of all layers have evicted is shown as not attended to. In another family than their own,
    # all positions of prompts as short may be kept by some head.
    if isinstance(policy, p.SparseDLLM | p.MaskKV) and family == OWN[type(policy)]:
        assert leaves_out(checks.Subject(policy, suited(policy, SEVERAL_AT_ONCE), family).batch.trace)


FURTHER_TODAY = [
    (kind, family) for kind, family in OWN.items() if any(kind in kinds for kinds in FURTHER.values())
]


@matrix("policy, family", EVERY, ALIKE, today=FURTHER_TODAY)
def test_policy_further(policy, family):
    every_day = [check for check, kinds in FURTHER.items() if type(policy) in kinds]
    asked = list(FURTHER) if family in FAMILIES else [checks.alone_as_in_a_batch]
    check(policy, family, asked if EXHAUSTIVE else every_day)


COPIES = checks.no_copy_of_the_cache_inside_the_loop


@matrix("policy, apart", EVERY, (False, True), today=[(p.DualCache, True), (p.DLLMCache, False)])
def test_no_copy_of_the_cache_inside_the_loop(policy, apart, optimized):
    """With guidance too if exhaustive; apart from the others, as it compiles as users do."""
    for scale in (0.0, 1.0) if EXHAUSTIVE else (1.0 * apart,):
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
BY_TURNS = [(s, UNDER[i % 2], FAMILIES[i // 2 % 2]) for i, s in enumerate(SAMPLER_CASES)]


@matrix("sampler, policy, family", SAMPLER_CASES, UNDER, FAMILIES, today=BY_TURNS)
def test_sampler(sampler, policy, family):
    """Every day by turns under the first two policies, in one family after the other."""
    asked = SAMPLER_CHECKS if EXHAUSTIVE else SAMPLERS_EVERY_DAY
    check_sampler(sampler, policies=(policy,), families=(family,), checks=asked)


class DueInTurns(policies.Policy):
    """Sequences of a batch are due in different steps, which the width does not provide for."""

    def select(self, cache, canvas):
        return canvas.block_begins | canvas.every_n_steps(3) | canvas.predicting_positions(canvas.block)

    def widths(self, spec, layout):
        return (layout.block,)


class DueInTurnsByItsOwnLayer(DueInTurns):
    """The same with a layer of its own, as an evicting policy has."""

    def layer(self, layer, x, cache, rows, canvas):
        return super().layer(layer, x, cache, rows, canvas)


@pytest.mark.parametrize("policy", [DueInTurns(), DueInTurnsByItsOwnLayer()], ids=short)
def test_a_sequence_that_is_due_leaves_its_batch_mates_alone(policy):
    """Also where `widths` does not hold what it selects: nobody computes more than alone."""
    check_policy(policy, checks=(checks.batch_mates_change_nothing, checks.alone_as_in_a_batch))


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
    held = sum(a.nbytes for a in jax.tree.leaves(dense))
    assert held == 2 * 2 * spec.layers * 2 * 12 * spec.kv_heads * spec.head_dim


@pytest.mark.exhaustive
@matrix("policy, family", EVERY, FAMILIES, today=[])
def test_the_bucket_changes_nothing(policy, family):
    options = dict(sampler=suited(policy, samplers.Confidence()), key=KEY, widths=None)
    plain, other = (generated(family, policy, buckets=of, **options) for of in (None, Ladder((4, 16))))
    assert_same_run(plain.trace, other.trace)
    computed = [out.trace.computed[:, 0] for out in (plain, other)]  # without padding
    np.testing.assert_array_equal(*computed)
    np.testing.assert_array_equal(plain.stats.computed_tokens, other.stats.computed_tokens)


def test_positions_at_the_end_are_computed_there_and_all_others_in_a_full_step():
    need = jnp.asarray([[0, 0, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    plain, in_blocks = canvas(np.asarray(need)), canvas(np.asarray(need), family="sdar")
    assert computed_rows(need, Variant(2), plain, policies.DLLMCache()).index.tolist() == [
        [3, 4],
        [5, 5],
        [5, 5],
    ]
    assert computed_rows(need, Variant(2), plain, policies.DualCache()).index.tolist() == [
        [3, 4],
        [2, 5],
        [5, 5],
    ]
    assert not computed_rows(need, Variant(2), in_blocks, policies.PrefixCache()).in_place
    assert exceeds(2, need, policies.DLLMCache(), plain).tolist() == [False, True, False]
    assert exceeds(2, need, policies.DualCache(), plain).tolist() == [False, False, False]
    assert exceeds(1, need, policies.DualCache(), plain).tolist() == [True, False, False]


AT_END = [case.policy for case in CASES.values() if case.policy.phases[-1].at_end]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("policy", AT_END, ids=short)
def test_a_step_at_the_end_runs_the_narrowest_width_that_holds_it(policy, family):
    model, layout = tiny(family), dj.Layout(prompt=28, response=16, block=4, steps=16)
    widths = step_widths(policy, model.spec, layout)
    options = dict(length=16, block=4, policy=policy, widths=widths, trace=True)
    out = dj.generate(model, [range(2, 30)], **options)
    selected = np.asarray(out.trace.computed)[:, 0].sum(axis=1)
    assert selected.min() < layout.length
    ran = [min(width for width in (*widths, layout.length) if width >= count) for count in selected]
    assert out.stats.executed_tokens.tolist() == [sum(ran)]


def test_a_generation_compiles_its_static_widths():
    """Full steps are no width, as they compute any set in place; a layer of one's own keeps its widest."""
    layout = dj.Layout(prompt=1024, response=256, block=32, steps=256)
    widths = lambda policy, override=None: step_widths(policy, tiny("llada").spec, layout, override)
    assert widths(policies.Policy()) == ()
    assert widths(policies.DualCache()) == widths(policies.SparseDLLM()) == (32,)
    assert widths(policies.DLLMCache()) == widths(policies.MaskKV()) == (256,)
    assert widths(policies.D2Cache()) == (160, 352)
    assert widths(policies.DualCache(), (8, 1280)) == (8,)
    assert widths(policies.SparseDLLM(), (8, 1280)) == (8, 32)
    assert widths(policies.DualCache(), (10**6,)) == ()
    assert widths(LayerOfItsOwn())[-1] == 1280, "nothing is known of when its full steps are whole"


class LayerOfItsOwn(policies.Policy):
    """The default widths hold the canvas."""

    def select(self, cache, canvas):
        return canvas.every_n_steps(2) | canvas.block

    def layer(self, layer, x, cache, rows, canvas):
        return super().layer(layer, x, cache, rows, canvas)
