"""Block-causal attention: a position sees its own block and earlier ones, wherever a sequence begins."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.decoding import request
from dllm_jax.eviction.layers import importance
from dllm_jax.nn.layer import Layer, embed
from dllm_jax.nn.mask import block_causal, key_mask, segments
from dllm_jax.nn.rope import grown, rope_of
from dllm_jax.policies.base import for_model
from dllm_jax.policies.parts.block_votes import queries_of_block, rows_of_block
from dllm_jax.state.rows import compact_rows, full_rows
from dllm_jax.testing import check_policy, checks
from dllm_jax.testing.checks import Subject
from dllm_jax.testing.runs import assert_close_scores, assert_same_run, of_sequence
from dllm_jax.xla import order
from tests.models import canvas, prompts, random_tokens, spec, tiny
from tests.policy_cases import (
    BLOCK_CASES,
    CASES,
    EVERY,
    EXHAUSTIVE,
    ONE_STEP,
    SEVERAL_AT_ONCE,
    WIDE,
    daily,
    leaves_out,
    matrix,
    short,
    suited,
)

SELECTING = policies.SparseDLLM, policies.MaskKV, policies.EvictPrompt
PADS, LENGTH = (0, 3, 6), 14
OF_BLOCKS = [case.policy for case in BLOCK_CASES.values()]
EVERY_DAY = policies.DualCache, *BLOCK_CASES
REFUSING = policies.DLLMCache, policies.WindowDiffusion, policies.SuffixDropout
REFUSED = [p for p in EVERY if isinstance(p, REFUSING) and not isinstance(p, SELECTING)]


def by_hand(pad: int, block: int, first: int) -> np.ndarray:
    """[q, k]: whether blocks that are counted from `first` let one see another; padding is never seen."""
    sees = np.zeros((LENGTH, LENGTH), bool)
    for i in range(pad, LENGTH):
        for j in range(pad, LENGTH):
            sees[i, j] = (j - first) // block <= (i - first) // block
    return sees


def test_in_a_causal_context_the_current_block_alone_sees_all_of_itself():
    position, described = jnp.arange(LENGTH)[None], spec("nemotron")
    for response in (None, 0, 9):
        mask = np.asarray(block_causal(None, described, position, None, LENGTH, response))[0, 0]
        begins = LENGTH if response is None else response
        for i, j in np.ndindex(LENGTH, LENGTH):
            assert mask[i, j] == (j <= i or (i >= begins and j >= begins))


def test_queries_grow_with_the_position_in_their_sequence():
    beta, original, pad = 0.1, 5, 3
    model = tiny("nemotron")
    q = jnp.ones((1, LENGTH, 1, 2))
    rope = rope_of(model.spec, LENGTH).padded(jnp.arange(LENGTH)[None] >= pad, model.spec)
    found = grown(q, rope, jnp.arange(LENGTH)[None], model.spec.rope_scaling)[0, :, 0, 0]
    wanted = [1 + beta * np.log(1 + max(i - pad, 0) // original) for i in range(LENGTH)]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert grown(q, rope, jnp.arange(LENGTH)[None], None) is q


@pytest.mark.parametrize("response", [None, 9])
@pytest.mark.parametrize("block", [1, 4, 32])
def test_the_mask_counts_blocks_from_the_first_real_position_or_the_response(block, response):
    valid = jnp.asarray([np.arange(LENGTH) >= pad for pad in PADS])
    described = spec("sdar", block_size=block, blocks_from="response" if response else "sequence")
    position = jnp.broadcast_to(jnp.arange(LENGTH), valid.shape)
    for known in {response, 9 if response is None else None}:  # the other one changes nothing
        first = [pad if known is None or response is None else response for pad in PADS]
        mask = block_causal(key_mask(valid), described, position, valid, LENGTH, known)
        for found, pad, begins in zip(np.asarray(mask)[:, 0], PADS, first, strict=True):
            np.testing.assert_array_equal(found[pad:], by_hand(pad, block, begins)[pad:])
        alone = block_causal(None, described, position[:1], None, LENGTH, known)
        np.testing.assert_array_equal(alone[0, 0], by_hand(0, block, first[0]))


def test_a_canvas_gives_each_computed_row_its_part_of_the_mask():
    valid = np.asarray([np.arange(LENGTH) >= pad for pad in PADS])
    of = canvas(np.zeros(valid.shape), prompt=8, family="sdar", valid=valid)
    need = jnp.asarray(valid & (np.arange(LENGTH) % 3 == 2))
    rows, whole = compact_rows(need, 6), of.attends(full_rows(jnp.asarray(valid)))
    for sequence, part in enumerate(np.asarray(of.attends(rows))[:, 0]):
        at = np.flatnonzero(need[sequence])
        np.testing.assert_array_equal(part[: len(at)], np.asarray(whole)[sequence, 0, at])
    # Of rows in one block one query speaks for all.
    size, begins = of.spec.block_size, np.asarray(PADS)[:, None]
    first = jnp.asarray((np.arange(LENGTH) >= begins) & (np.arange(LENGTH) < begins + size))
    rows = dataclasses.replace(compact_rows(first, size), in_one_block=True)
    one = of.attends(rows)
    assert one.shape == (len(PADS), 1, 1, LENGTH)
    second = jnp.tile(jnp.arange(size) == 1, (len(PADS), 1))
    np.testing.assert_array_equal(one, of.attends(rows.where(second)))
    np.testing.assert_array_equal(one, of.attends(compact_rows(first, 1)))
    np.testing.assert_array_equal(one[:, 0, 0], valid & np.asarray(first))
    read = of.attends(rows, jnp.asarray(valid & (np.arange(LENGTH) != 8)))
    np.testing.assert_array_equal(read[..., 8], False)


@pytest.mark.parametrize("blocks_from", ["sequence", "response"])
def test_rows_in_place_attend_to_nothing_beyond_their_lookahead(blocks_from):
    valid = np.asarray([np.arange(LENGTH) >= pad for pad in PADS])
    described = dataclasses.replace(spec("sdar"), blocks_from=blocks_from, block_size=4)
    of = canvas(np.zeros(valid.shape), prompt=7, spec=described, valid=valid)
    rows = full_rows(jnp.asarray(valid))
    ahead = np.arange(LENGTH) - np.arange(LENGTH)[:, None]  # of key and query
    seen = np.asarray(of.attends(rows))[:, 0] & valid[:, :, None]
    assert max(ahead[one].max() for one in seen) == of.lookahead(rows) - 1
    assert of.lookahead(compact_rows(jnp.asarray(valid), LENGTH)) is None
    for family in ("nemotron", "llada"):
        assert canvas(np.zeros(valid.shape), prompt=7, family=family).lookahead(rows) is None


def test_segments_of_a_prompt_attend_as_the_whole_does(monkeypatch):
    monkeypatch.setattr("dllm_jax.nn.mask.SEGMENT", 128)
    described, length, pads = spec("sdar"), 400, np.array([[0], [150]])
    cuts = segments(length, length, described.block_size)
    assert cuts == [(0, 256, 384), (256, length, length)]
    arrays, valid = (
        np.random.default_rng(0).standard_normal((3, 2, length, 2, 16), np.float32),
        np.arange(length) >= pads,
    )

    @functools.partial(jax.jit, static_argnames="lookahead")
    def attend(qkv, valid, lookahead=None):
        position = jnp.broadcast_to(jnp.arange(length), valid.shape)
        mask = block_causal(key_mask(valid), described, position, valid, length)
        return Layer({}, described, rope_of(described, length), 0).attention(*qkv, mask, lookahead)

    whole = attend(arrays, valid)
    for a, b in zip(whole, attend(arrays, valid, described.block_size), strict=True):
        a, b = (np.moveaxis(x, 1, -1)[valid] if x.ndim == 3 else np.asarray(x)[valid] for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # A bound too low shows.
    assert not np.allclose(whole[0][0], attend(arrays, valid, -120)[0][0])


def test_a_block_behind_a_long_prompt_computes_the_log_sum_exp_of_its_own_queries(monkeypatch):
    """And reads none of the prompt's: cuDNN returns none, so that XLA would compute all scores for it."""
    of = canvas(np.zeros((2, LENGTH)), prompt=8, spec=dataclasses.replace(spec("sdar"), block_size=4))
    rows, own = full_rows(of.everything), rows_of_block(of)
    q, k = (jax.random.normal(jax.random.key(i), (2, LENGTH, 2, 16)) for i in range(2))
    layer = Layer({}, of.spec, rope_of(of.spec, LENGTH), 0)
    lse, mask = layer.attention(q, k, k, of.attends(rows))[1], of.attends(own)
    assert mask is not None
    taken = queries_of_block(layer, q, k, lse, rows, own, mask)
    monkeypatch.setattr("dllm_jax.policies.parts.block_votes.SEGMENT", LENGTH - 1)
    computed = queries_of_block(layer, q, k, jnp.full_like(lse, jnp.nan), rows, own, mask)
    for a, b in zip(taken, computed, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_no_mask_is_made_where_all_see_all():
    of = canvas(np.zeros((1, LENGTH)), prompt=8)
    assert of.attends(full_rows(of.everything)) is None
    assert block_causal(None, of.spec, jnp.zeros((1, 2), jnp.int32), None, LENGTH) is None


@pytest.mark.parametrize("family", ["sdar", "nemotron"])
def test_padding_moves_no_block(family):
    """Logits, captured inputs, likelihoods and importance of a left-padded sequence are those of it alone."""
    model, pad = tiny(family, block_size=4), 3
    tokens = random_tokens(model.spec, 1, LENGTH)
    padded = np.pad(tokens, ((0, 0), (pad, 0)), constant_values=model.spec.eos_id)
    valid = np.arange(LENGTH + pad)[None] >= pad
    logits = dj.forward(model, jnp.asarray(padded), jnp.asarray(valid))[:, pad:]
    np.testing.assert_allclose(logits, dj.forward(model, jnp.asarray(tokens)), atol=2e-5)
    seen = [
        dj.capture(model, jnp.asarray(t), ("residual",), **options).residual
        for t, options in ((padded, dict(prompt_mask=valid)), (tokens, {}))
    ]
    np.testing.assert_allclose(seen[0][..., pad:, :], seen[1], atol=2e-5)
    found = [
        importance(model, embed(model.params, jnp.asarray(t)), jnp.asarray(v), jnp.asarray(v))
        for t, v in ((padded, valid), (tokens, np.ones_like(tokens, bool)))
    ]
    np.testing.assert_allclose(*found, atol=1e-5)


def plainly(model: dj.Model, prompt: np.ndarray, length: int, threshold: float) -> tuple[np.ndarray, int]:
    """One pass over everything per step, block by block: the answer, and how many steps it took."""
    size, mask_id = model.spec.block_size, model.spec.mask_id
    count, end, of_response = len(prompt), len(prompt) + length, model.spec.blocks_from == "response"
    whole = end if of_response or not model.spec.completes_blocks else -(-end // size) * size
    canvas, steps = np.r_[prompt, np.full(whole - count, mask_id)], 0
    for start in range(count if of_response else count // size * size, end, size):
        while (canvas[start : min(start + size, end)] == mask_id).any():
            logits = np.asarray(dj.forward(model, jnp.asarray(canvas[None]), response=count)[0])
            logits = np.r_[logits[:1], logits[:-1]] if model.spec.shifted else logits
            belief = np.asarray(jax.nn.softmax(logits)) * (np.arange(model.spec.vocab) != mask_id)
            masked = start + np.flatnonzero(canvas[start : start + size] == mask_id)
            if model.spec.shifted and masked[0] == start:  # the block before predicts a block's first token
                masked = masked[:1]
            best = belief[masked].max(axis=1)
            chosen = masked[(best >= threshold) | (best == best.max())]
            canvas[chosen], steps = belief[chosen].argmax(axis=1), steps + 1
    return canvas[count:end], steps


TWO = (9, 6), (1, 4)
SURE = samplers.Threshold(0.3)


@matrix(
    "shifted, lengths, sampler, begin",
    (False, True),
    TWO,
    (SURE, samplers.Confidence()),
    ("sequence", "response", "sequence, cut short"),
    today=[
        (False, TWO[0], samplers.Confidence(), "sequence, cut short"),
        (True, TWO[0], SURE, "sequence"),
        (False, TWO[1], samplers.Confidence(), "sequence"),
        (False, TWO[0], SURE, "response"),
    ],
)
def test_the_exact_decoder_computes_no_finished_block_again(shifted, lengths, sampler, begin):
    """It decodes as passes over everything do, of prompts whose ends share blocks with the answers or not."""
    blocks = dict(blocks_from=begin.partition(",")[0], completes_blocks="cut" not in begin)
    model, length = tiny("sdar", block_size=4, shifted=shifted, **blocks), 10
    prompt, mask = prompts(model, lengths)
    options, threshold = dict(prompt_mask=mask, sampler=sampler, trace=True), getattr(sampler, "threshold", 2)
    options["widths"] = None if shifted else (4,)
    out = dj.generate(model, prompt, length=length, **options)
    assert out.tokens.shape == (2, prompt.shape[1] + length)
    computed = np.asarray(out.trace.computed)
    for sequence, count in enumerate(lengths):
        want, steps = plainly(model, prompt[sequence, -count:], length, threshold)
        np.testing.assert_array_equal(np.asarray(out.tokens)[sequence, -length:], want)
        assert int(out.stats.nfe[sequence]) == steps
        assert int(out.stats.decoded_tokens[sequence]) == length
        # After the first step a block, or two: the finished one with the one after it.
        rows = computed[1:steps, sequence].sum(axis=-1)
        assert rows.max() <= 8
        assert (rows <= 4).any()
        # Nor does a trace show later blocks as attended to.
        read = np.asarray(out.trace.read)[1:steps, sequence, ::-1]
        assert (read.argmax(axis=1) == computed[1:steps, sequence, ::-1].argmax(axis=1)).all()
    with pytest.raises(ValueError, match="block=8 must divide the blocks of sdar, block_size=4"):
        dj.generate(model, prompt, length=8, block=8)
    with pytest.raises(ValueError, match=r"suffix= is not supported by models with blocks \(sdar\)"):
        dj.generate(model, prompt, length=8, suffix=[1])


@pytest.mark.parametrize("policy", REFUSED, ids=short)
def test_policies_that_mean_nothing_there_refuse(policy):
    model = tiny("sdar")
    prompt, _ = prompts(model)
    with pytest.raises(ValueError, match=rf"{short(policy)} does not support .*\(sdar, block_size=12\)"):
        dj.generate(model, prompt, length=4, policy=policy)


@pytest.mark.parametrize(("options", "reason"), [
    (dict(sampler=samplers.Edit()), "Edit is not supported by FOCUS: it edits tokens"),
    (dict(sampler=samplers.Threshold(cfg_scale=1.0)), "cfg_scale is not supported by FOCUS"),
    (dict(sampler=samplers.Threshold(early_commit=samplers.EarlyCommit())), "early_commit is not supported"),
])  # fmt: skip
def test_options_that_need_all_outputs_refuse_rows_that_leave(options, reason):
    with pytest.raises(ValueError, match=reason):
        dj.generate(tiny("sdar"), prompts(tiny("sdar"))[0], length=4, policy=policies.FOCUS(), **options)


@pytest.mark.parametrize("policy", OF_BLOCKS[1:], ids=short)
def test_policies_of_blocks_refuse_models_without(policy):
    with pytest.raises(ValueError, match=rf"{short(policy)} supports models with blocks only \(llada "):
        dj.generate(tiny("llada"), prompts(tiny("llada"))[0], length=4, policy=policy)


@pytest.mark.parametrize("policy", [*OF_BLOCKS[1:], *(CASES[kind].policy for kind in SELECTING)], ids=short)
def test_policies_of_finished_blocks_refuse_a_causal_context(policy):
    with pytest.raises(ValueError, match=rf"{short(policy)} does not support a causal context \(nemotron\)"):
        dj.generate(tiny("nemotron"), prompts(tiny("nemotron"))[0], length=4, policy=policy)


def test_samplers_that_mean_nothing_there_refuse():
    shifted = tiny("sdar", block_size=4, shifted=True)
    for model, sampler, reason in (
        (tiny("sdar"), samplers.WINO(), "WINO does not support .* it lets all"),
        (shifted, samplers.DreamSchedule(), "DreamSchedule is not supported with blocks on"),
    ):
        with pytest.raises(ValueError, match=reason):
            dj.generate(model, prompts(model)[0], length=4, sampler=sampler)


ADMITTED = [p for p in (*EVERY, *OF_BLOCKS) if not isinstance(p, REFUSING + SELECTING)]


# A causal context takes those that reuse within a block; a block of its own is all of the model's.
WITHIN_BLOCKS = policies.D2Cache, policies.DKVDecode, policies.DKVPD, policies.ElasticCache
PLACES = [(policy, "sdar") for policy in daily(ADMITTED, *EVERY_DAY)]
PLACES += [(policy, "nemotron") for policy in daily((p for p in EVERY if p in ADMITTED), policies.D2Cache)]


class InOneWidth(Subject):
    """With one kind of narrow steps, of a block or of half of it, and with none for exact decoding."""

    def run(self, prompt=None, mask=None, **options):
        if options.get("widths") is None and not EXHAUSTIVE:
            half = self.family == "nemotron" or isinstance(self.policy, policies.FOCUS)
            exact = type(options.get("policy")) is policies.Policy
            options["widths"] = WIDE if exact else (6,) if half else (12,)
        return super().run(prompt, mask, **options)


@pytest.mark.parametrize(("policy", "family"), PLACES, ids=lambda v: v if isinstance(v, str) else short(v))
def test_all_other_policies_decode(policy, family):
    case, known = (CASES | BLOCK_CASES).get(type(policy)), {}
    if case is not None:
        layout = dict(case.limit_layout)
        # With other static settings the limit is another program, of the fewest kinds of steps.
        if jax.tree.structure(case.limit) != jax.tree.structure(policy):
            layout.pop("widths", None)
        known = dict(limit=case.limit, limit_options=layout)
    if case is not None and case.limit_layout is ONE_STEP:  # in the whole of a model's block
        known["limit_options"] = dict(length=12, block=12, steps=1)
    if isinstance(policy, policies.ElasticCache):
        known["limit"] = policies.ElasticCache(window=24)
    of = InOneWidth(policy, suited(policy, SEVERAL_AT_ONCE), family, **known)
    asked = [checks.batch_mates_change_nothing, checks.alone_as_in_a_batch, checks.padding_is_inert]
    asked += [checks.exact_limit] * (family == "sdar" or isinstance(policy, WITHIN_BLOCKS))
    for check in asked:
        check(of)


class InShortBlocks(Subject):
    """On a model whose blocks are shorter than the prompts, of which some is stored when decoding begins."""

    @property
    def model(self):
        return tiny("sdar", block_size=4)

    def run(self, prompt=None, mask=None, **options):
        return super().run(prompt, mask, **dict(widths=WIDE) | options | dict(block=4))


_evicting = functools.partial(policies.EvictPrompt, policy=policies.Policy(), reselect=False)
_rolling = functools.partial(
    policies.EvictPrompt,
    heads=eviction.EvenHeads(),
    layers=eviction.UniformLayers(),
    policy=policies.Policy(),
)


@pytest.mark.parametrize(("policy", "limit"), [
    (_evicting(budget=2), _evicting(budget=9)),
    (_evicting(budget=3, votes=eviction.SnapKV(window=2)), _evicting(budget=9)),
    (_rolling(budget=5), _rolling(budget=24)),
    (policies.MaskKV(budget=2), policies.MaskKV(budget=9)),
    (policies.SparseDLLM(keep=0.2), policies.SparseDLLM(keep=1)),
], ids=str)  # fmt: skip
def test_eviction_chooses_among_stored_pairs(policy, limit):
    of = InShortBlocks(policy, limit=limit)
    checks.exact_limit(of)
    checks.batch_mates_change_nothing(of)
    checks.padding_is_inert(of)
    assert leaves_out(of.batch.trace)
    if EXHAUSTIVE:
        checks.alone_as_in_a_batch(of)


@pytest.mark.parametrize(("policy", "shifted", "reason"), [
    (policies.EvictPrompt(), False, r"prompt is computed once\. Use EvictPrompt\(.*policy=Policy\(\)\)"),
    (policies.MaskKV(reselect=True), False, r"as many .* in every layer.* Use MaskKV\(.*EvenHeads"),
    (_rolling(votes=eviction.SnapKV(2)), False, "compute no prompt position"),
    (_rolling(), True, "a token that the block before it predicts"),
], ids=("DualCache", "heads", "prompt-votes", "shifted"))  # fmt: skip
def test_selecting_again_names_what_it_cannot_do(policy, shifted, reason):
    model = tiny("sdar", block_size=4, shifted=shifted)
    with pytest.raises(ValueError, match=reason):
        dj.generate(model, prompts(model)[0], length=4, policy=policy)


def test_templates_may_skip_blocks():
    """The step that enters the next one computes the finished block and the skipped one."""
    model = tiny("sdar", block_size=4, layers=1)
    template = random_tokens(model.spec, 1, 18)
    template[0, [1, 3, 5, 6, 13, 14, 17]] = model.spec.mask_id
    run = lambda policy: (
        dj.infill(model, template, policy=policy, sampler=SURE, trace=True, widths=WIDE).trace
    )
    ours, exact = run(_rolling(budget=18)), run(policies.Policy())
    assert_same_run(ours, exact)
    assert_close_scores(ours, exact, atol=1e-5)


def test_a_shorter_last_block_attends_to_no_padding():
    """Alone, where the chosen pairs need no mask, as in a batch."""
    model = tiny("sdar", block_size=4, completes_blocks=False)
    prompt, mask = prompts(model, (9, 5))
    options = dict(length=10, policy=policies.MAGE(2), sampler=samplers.Threshold(1.0), trace=True)
    batch = dj.generate(model, prompt, prompt_mask=mask, widths=WIDE, **options).trace
    ours, alone = of_sequence(batch, 0, 19), dj.generate(model, prompt[:1], widths=WIDE, **options).trace
    assert_same_run(ours, alone)
    assert_close_scores(ours, alone, atol=1e-5)


class Uncomputed(policies.FOCUS):
    """Begins with pairs that show where they are read."""

    def init(self, *args):
        cache = super().init(*args)
        return cache._replace(layers=jax.tree.map(lambda a: a + jnp.nan, cache.layers))


def test_masks_that_left_in_front_of_given_tokens_are_not_read():
    """A template's tokens stay, and with them all that is read up to them."""
    model = tiny("sdar", layers=3)
    template = random_tokens(model.spec, 2, 12)
    template[:, :7] = model.spec.mask_id
    out = dj.infill(model, template, policy=Uncomputed(1.0), sampler=SURE, widths=WIDE, nonfinite="ignore")
    assert out.stats.finite.all()
    assert (out.stats.widened_tokens < 0).any(), "masks leave later steps"


def test_autoregressive_decoding_takes_no_evicted_pairs():
    with pytest.raises(ValueError, match=r"policy=EvictPrompt\(\) is not supported by Autoregressive"):
        dj.generate(tiny("sdar"), [[1]], length=4, policy=_rolling(), sampler=samplers.Autoregressive())


def test_selecting_again_keeps_the_budget_for_all_earlier_blocks():
    """Keys and values of `budget` positions and of one block, however long prompt and response are."""
    model, stored = tiny("sdar", block_size=4), []
    for prompt, length in ((16, 16), (64, 64)):
        layout = dj.Layout(prompt, length, 4, length)
        cache = for_model(_rolling(budget=6), model.spec).init(model.spec, layout, 1, jnp.float32)
        stored.append(jax.tree.leaves(cache.layers)[0].shape[2])
    assert stored == [10, 10]


@pytest.mark.parametrize(
    "policy", daily((policies.Policy(), policies.DualCache()), policies.DualCache), ids=short
)
def test_its_loop_stays_on_the_device_and_copies_no_cache(policy, request):
    if EXHAUSTIVE:
        request.getfixturevalue("optimized")
    copies = [checks.no_copy_of_the_cache_inside_the_loop] * EXHAUSTIVE
    looked_at = checks.one_program_per_setting, checks.nothing_leaves_the_device_inside, *copies
    check_policy(policy, families=("sdar",), checks=looked_at)


def test_requests_in_flight_and_streams_give_what_a_prompt_gives_alone():
    """Under a sampler that edits, whose blocks go on without masks."""
    model, asked = tiny("sdar", block_size=4), [list(range(10, 10 + n)) for n in (9, 6, 11)]
    options = dict(length=10, sampler=samplers.Edit(0.3, 0.2, most_steps=2), stop_at_eos=True, widths=WIDE)
    alone = [dj.generate(model, [prompt], **options) for prompt in asked]
    for index, out in dj.generate_many(model, asked, slots=2, **options):
        np.testing.assert_array_equal(out.tokens, alone[index].tokens)
        assert out.stats.nfe == alone[index].stats.nfe
    *_, last = seen = list(dj.stream(model, asked[:1], **options))
    np.testing.assert_array_equal(last.output.tokens, alone[0].tokens)
    assert [snapshot.block for snapshot in seen[:2]] == [0, 1]


def test_long_canvases_are_aligned_which_changes_no_answer(monkeypatch):
    model, options = tiny("sdar", block_size=4, layers=1), dict(length=6, sampler=SURE)
    prompt = random_tokens(model.spec, 1, order.LONG)
    layout = request.prepare(model, prompt, **options).plan.layout
    assert (layout.length % order.ALIGNED, layout.end) == (0, order.LONG + 6)
    found = np.asarray(dj.generate(model, prompt, **options).tokens)
    monkeypatch.setattr(order, "LONG", 2 * order.LONG)
    assert request.prepare(model, prompt, **options).plan.layout.length == found.shape[1] + 3
    np.testing.assert_array_equal(found, dj.generate(model, prompt, **options).tokens)


def test_specs_survive_json():
    """As exported programs and converted directories hold them."""
    model = dj.load(pathlib.Path(__file__).parent / "goldens" / "models" / "llada2-tiny-dense2")
    fields = json.loads(json.dumps(dataclasses.asdict(model.spec)))
    assert dj.ModelSpec.of_fields(fields) == model.spec
    with pytest.raises(ValueError, match=r"experts=\[3\] must be an object"):
        dj.ModelSpec.of_fields(fields | {"experts": [3]})
    with pytest.raises(ValueError, match="rope_width=18 must be even and at most head_dim=16"):
        model.replace_spec(rope_width=18)
