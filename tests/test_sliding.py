"""Block schedules: sliding blocks and those that end at delimiters. Recordings: test_goldens."""

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.policies import SlidingCache
from dllm_jax.samplers import WINO, Confidence, DreamSchedule, FreeDave, Threshold
from dllm_jax.testing.runs import assert_same_run, finite, of_sequence
from tests.models import FAMILIES, families, generated, prompts, tiny
from tests.policy_cases import daily, matrix, short
from tests.replay.stepping import states

SHAPE = dict(length=24, lengths=(9, 6))
GREEDY, CONST = dj.Sliding(6), dj.Sliding(6, longest=6)
SEVERAL = Threshold(0.1)


BLOCKS, SAMPLERS = (GREEDY, CONST, dj.Sliding(4, longest=7)), (SEVERAL, Confidence(), DreamSchedule())


@matrix(
    "block, sampler, family",
    BLOCKS,
    SAMPLERS,
    FAMILIES,
    today=zip(BLOCKS, SAMPLERS, ["llada"] * 3, strict=True),
)
def test_masks_are_decoded_up_to_where_the_number_of_tokens_says(block, sampler, family):
    trace = generated(family, sampler=sampler, block=block, **SHAPE).trace
    tokens, mask_id = np.asarray(trace.tokens), tiny(family).spec.mask_id
    for step, sequence in np.argwhere(np.asarray(trace.active)):
        masked = tokens[step, sequence] == mask_id
        begin, decoded = np.argmax(masked), 24 - masked.sum()
        end = min(9 + block.block + decoded, 33, begin + (block.longest or 99))
        scored = np.flatnonzero(np.isfinite(trace.score[step, sequence]))
        np.testing.assert_array_equal(scored, np.flatnonzero(masked & (np.arange(33) < end)))
    assert not (tokens[-1] == mask_id).any()


@matrix("sampler, family", SAMPLERS, FAMILIES, today=[(DreamSchedule(), "dream")])
def test_a_block_as_long_as_the_response_is_one_block(sampler, family):
    sliding, one = (
        generated(family, sampler=sampler, block=block, **SHAPE).trace for block in (dj.Sliding(24), 24)
    )
    assert_same_run(sliding, one)
    near = generated(family, sampler=sampler, block=GREEDY, **SHAPE).trace
    assert not np.array_equal(near.tokens, one.tokens[: len(near.tokens)])


@families("llada")
def test_a_round_begins_whenever_a_block_of_tokens_is_decoded(family):
    policy = SlidingCache(window=3)
    trace = generated(family, policy, sampler=SEVERAL, block=GREEDY, **SHAPE).trace
    mask_id, shifted = tiny(family).spec.mask_id, tiny(family).spec.shifted
    tokens, valid = np.asarray(trace.tokens), np.arange(33) >= [[0], [3]]
    for sequence in range(2):
        since = 0
        for step in np.flatnonzero(trace.active[:, sequence]):
            computed = np.asarray(trace.computed[step, sequence])
            masked = tokens[step, sequence] == mask_id
            begin, end = np.argmax(masked), min(9 + 6 + 24 - masked.sum(), 33)
            if since == 0:
                assert computed[valid[sequence]].all()
            else:
                moved = begin - np.argmax(tokens[step - 1, sequence] == mask_id)
                first = min(begin - max(moved, 3), begin - shifted)
                np.testing.assert_array_equal(np.flatnonzero(computed), np.arange(first, end - shifted))
            since += (masked & (tokens[step + 1, sequence] != mask_id)).sum()
            since = 0 if since >= 6 else since


UNDER = (SlidingCache(3), policies.DualCache(), policies.DKVDecode(refresh_every=2))


@families("llada")
@pytest.mark.parametrize("policy", daily(UNDER, SlidingCache), ids=short)
def test_each_sequence_slides_by_itself(policy, family):
    """Sequences of a batch take other numbers of steps, and equal themselves alone."""
    model = tiny(family)
    prompt, mask = prompts(model, (9, 6))
    sampler = SEVERAL if family == "llada" else Threshold(0.3)
    options = dict(policy=policy, sampler=sampler, block=CONST, length=24, trace=True)
    batch = dj.generate(model, prompt, prompt_mask=mask, **options)
    assert batch.stats.nfe[0] != batch.stats.nfe[1]
    for sequence, width in enumerate((9, 6)):
        alone = dj.generate(model, prompt[sequence : sequence + 1, -width:], **options)
        assert_same_run(of_sequence(batch.trace, sequence, width + 24), alone.trace, computed=True)


@families("dream")
def test_without_a_window_and_with_fixed_blocks_it_is_the_dual_cache(family):
    ours, near, dual = (
        generated(family, policy, block=6, **SHAPE).trace
        for policy in (SlidingCache(0), SlidingCache(5), policies.DualCache())
    )
    assert_same_run(ours, dual, computed=True)
    assert np.abs(finite(near.score) - finite(dual.score)).max() > 1e-4


def test_features_that_need_fixed_blocks_are_refused():
    for policy in (policies.SparseDLLM(), policies.D2Cache(), policies.SuffixDropout()):
        with pytest.raises(ValueError, match=rf"block=Sliding\(block=6.* not supported by {short(policy)}"):
            generated(policy=policy, block=GREEDY, **SHAPE)
    with pytest.raises(ValueError, match="is not supported by WINO: it revises tokens"):
        generated(sampler=WINO(), block=GREEDY, **SHAPE)
    for options in (dict(block=0), dict(longest=0)):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            dj.Sliding(**options)


ADAPTIVE = dj.AdaBlock(6, delimiters=range(0, 59, 2), threshold=0.08)


@matrix(
    "policy, family",
    (policies.Policy(), policies.PrefixCache(), policies.DualCache()),
    FAMILIES,
    today=[(policies.DualCache(), "llada"), (policies.PrefixCache(), "dream")],
)
def test_each_sequence_ends_its_blocks_by_itself(policy, family):
    """Blocks are decoded to their delimiter, and sequences of a batch equal themselves alone."""
    model = tiny(family)
    prompt, mask = prompts(model, (9, 6))
    options = dict(policy=policy, sampler=Threshold(0.2), block=ADAPTIVE, length=30, trace=True)
    batch, starts = dj.generate(model, prompt, prompt_mask=mask, **options), []
    for sequence, width in enumerate((9, 6)):
        alone = dj.generate(model, prompt[sequence : sequence + 1, -width:], **options)
        assert_same_run(of_sequence(batch.trace, sequence, width + 30), alone.trace, computed=True)
        ran = states(model, prompt[sequence : sequence + 1, -width:], **options)
        starts.append(sorted({int(state.canvas.block_start[0]) - width for state in ran}))
        lengths = np.diff(starts[-1])
        assert (lengths.sum(), lengths.max()) == (30, 7)
        assert set(lengths[:-1]) - {6}, "no block ended at a delimiter"
    assert starts[0] != starts[1]


@matrix(
    "policy, family",
    (policies.Policy(), policies.PrefixCache(), policies.DualCache()),
    FAMILIES,
    today=[(policies.DualCache(), "llada"), (policies.Policy(), "dream")],
)
def test_without_delimiters_blocks_have_one_length(policy, family):
    never = dj.AdaBlock(7, delimiters=range(59), threshold=1.01)
    options = dict(length=24, lengths=(9, 6), sampler=SEVERAL)
    ours, fixed, near = (
        generated(family, policy, block=block, **options).trace
        for block in (never, 7, dj.AdaBlock(7, delimiters=range(59), threshold=0.05))
    )
    assert_same_run(ours, fixed, computed=True)
    assert not np.array_equal(near.tokens, ours.tokens[: len(near.tokens)])


def test_delimiters_end_blocks_under_suffix_guidance_stops_and_early_ends():
    model = tiny("llada")
    options = dict(
        sampler=Threshold(0.1, cfg_scale=0.5), block=ADAPTIVE, length=24, policy=policies.DualCache()
    )
    whole = dj.generate(model, [[5, 6, 7]], suffix=[9, 8], **options)
    assert whole.tokens[0, -2:].tolist() == [9, 8]
    assert not (np.asarray(whole.tokens) == model.spec.mask_id).any()
    token = int(whole.tokens[0, 3 + 12])
    stopped = dj.generate(model, [[5, 6, 7]], suffix=[9, 8], stop=[[token]], **options)
    first = whole.tokens[0].tolist().index(token, 3)
    np.testing.assert_array_equal(stopped.tokens[0, :first], whole.tokens[0, :first])
    assert stopped.stats.nfe[0] <= whole.stats.nfe[0]


def test_options_that_exclude_blocks_ending_at_delimiters_are_refused():
    model, one = tiny("llada"), [[5, 6, 7]]
    shape = dict(block=ADAPTIVE, length=24, sampler=SEVERAL)
    for options, message in (
        (dict(policy=policies.SparseDLLM()), r"block=AdaBlock.* not supported by SparseDLLM: the first step"),
        (dict(policy=policies.DKVDecode()), "not supported by DKVDecode: the first step"),
        (dict(sampler=Confidence()), "not supported by Confidence: it needs to know how many"),
        (dict(sampler=WINO()), "not supported by WINO: it needs to know how many"),
        (dict(sampler=FreeDave(SEVERAL)), "not supported by FreeDave: drafts share"),
        (dict(block=dj.AdaBlock(delimiters=(61,))), r"delimiters holds 61, .* vocabulary \[0, 61\)"),
        (dict(block=dj.AdaBlock(delimiters=(model.spec.mask_id,))), "but the mask's, 59"),
    ):
        with pytest.raises(ValueError, match=message):
            dj.generate(model, one, **shape | options)
    with pytest.raises(ValueError, match="is not supported by sdar: it is trained in blocks of its own"):
        dj.generate(tiny("sdar"), one, **shape)
    with pytest.raises(ValueError, match=r"block=AdaBlock.* is not supported by infill: its blocks begin"):
        dj.infill(model, [[5, model.spec.mask_id]], block=ADAPTIVE)
    for delimiters in ((), [-1], ["a"], [0.5], 198):
        with pytest.raises(ValueError, match=r"delimiters=.* must be 1 or more values, each a whole number"):
            dj.AdaBlock(delimiters=delimiters)


def test_delimiters_of_a_tokenizer():
    tokenizer = dj.load_tokenizer(dj.bundled.path("tiny-llada"))
    assert tokenizer.batch_decode([[i] for i in dj.delimiters(tokenizer)]) == ["\n\n", "\n"]
    assert tokenizer.batch_decode([[i] for i in dj.delimiters(tokenizer, [".", "user"])]) == ["user", "."]
    for texts in ("\n", [], [""], 3, [3]):
        with pytest.raises(ValueError, match=r"texts=.* must be a list of texts, none of them empty"):
            dj.delimiters(tokenizer, texts)
    with pytest.raises(ValueError, match="no token of the vocabulary ends with one of them"):
        dj.delimiters(tokenizer, ["<|endoftext|>"])
