"""Answers that grow (DAEDAL, DreamOn): limits, batches, moves, and refusals. Recordings: test_goldens."""

import jax
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.decoding.report import LengthWarning
from dllm_jax.decoding.request import prepare
from dllm_jax.decoding.watch.recording import ABSENT, Recording
from dllm_jax.samplers import DAEDAL, Confidence, DreamOn, FreeDave, Threshold
from dllm_jax.testing.runs import assert_same_run, assert_same_stats, of_sequence
from tests.models import FAMILIES, prompts, tiny
from tests.policy_cases import matrix

EOS = {"llada": 18, "dream": 16}  # a token that the tiny model predicts often
UNDER = policies.Policy(), policies.PrefixCache(), policies.DualCache()
SAMPLER = DAEDAL(0.3, 0.2, grow_below=0.04, insert_below=0.9, expansion=3, checked=6)
SHAPE = dict(length=6, max_length=30, block=5, sampler=SAMPLER)
pytestmark = pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.LengthWarning")


class Lazy(policies.DualCache):
    """Is full at the first step only: positions that come later are never computed outside of their block."""

    def select(self, cache, canvas):
        return canvas.first_step | canvas.predicting_positions(canvas.block)


def model_of(family: str) -> dj.Model:
    return tiny(family).replace_spec(eos_id=EOS[family])


@matrix("policy, family", UNDER, FAMILIES, today=[(UNDER[2], "llada"), (UNDER[0], "dream")])
def test_each_sequence_grows_by_itself(policy, family):
    """Sequences of a batch grow by other steps, and equal themselves alone."""
    model = model_of(family)
    prompt, mask = prompts(model, (9, 6))
    options = SHAPE | dict(policy=policy, trace=True)
    batch = dj.generate(model, prompt, prompt_mask=mask, **options)
    lengths = np.asarray(batch.stats.length)
    for sequence, width in enumerate((9, 6)):
        alone = dj.generate(model, prompt[sequence : sequence + 1, -width:], **options)
        assert_same_run(of_sequence(batch.trace, sequence, width + 30), alone.trace, computed=True)
        assert_same_stats(batch.stats, alone.stats, sequence)
        active = np.asarray(batch.trace.active[:, sequence])
        for name in ("inserted", "moved"):
            ours = np.asarray(getattr(batch.trace, name))[active, sequence]
            np.testing.assert_array_equal(ours, getattr(alone.trace, name)[:, 0])
        tokens, end = np.asarray(alone.tokens)[0, width:], lengths[sequence]
        assert (tokens[end:] == model.spec.eos_id).all()
        assert not (tokens[:end] == model.spec.mask_id).any()
    assert batch.stats.nfe[0] != batch.stats.nfe[1]
    assert (np.asarray(batch.stats.insertions) > 0).any()
    assert (np.asarray(batch.stats.growth_steps) > 1).any()


@matrix("policy, family", UNDER, FAMILIES, today=[(UNDER[1], "llada"), (UNDER[2], "dream")])
def test_an_answer_that_cannot_grow_is_that_of_a_threshold(policy, family):
    model, (prompt, mask) = model_of(family), prompts(tiny(family), (9, 6))
    options = dict(prompt_mask=mask, length=12, block=5, policy=policy, trace=True)
    plain = dj.generate(model, prompt, sampler=Threshold(0.3), **options)
    never = DAEDAL(0.3, grow_below=0, insert_below=0)
    grown = dj.generate(model, prompt, sampler=never, max_length=12, **options)
    np.testing.assert_array_equal(grown.tokens, plain.tokens)
    np.testing.assert_array_equal(grown.stats.nfe, plain.stats.nfe + 1)
    np.testing.assert_array_equal(grown.trace.tokens[1:], plain.trace.tokens)
    assert not np.asarray(grown.stats.wanted_more).any()
    np.testing.assert_array_equal(grown.stats.decoded_tokens, plain.stats.decoded_tokens)


def test_confidences_and_log_probabilities_move_with_their_tokens():
    """Followed by hand: a list per answer, into which masks are inserted."""
    model, options = model_of("llada"), SHAPE | dict(trace=True, logprobs=0)
    prompt = prompts(model, (9,))[0]
    *_, last = dj.stream(model, prompt, **options)
    out, trace, mask_id = last.output, last.output.trace, model.spec.mask_id
    assert (np.asarray(trace.inserted) >= 0).sum() > 1
    answer = [(mask_id, np.nan, -1)] * 30
    for step in range(int(trace.steps)):
        after, at, moved = (
            np.asarray(a)
            for a in (trace.tokens[step + 1, 0, 9:], trace.inserted[step, 0], trace.moved[step, 0])
        )
        score = np.asarray(trace.score[step, 0, 9:])
        order = np.arange(30)
        if at >= 0:
            order = np.concatenate([order[: at + 1], np.full(moved, -1), order[at + 1 :]])[:30]
        now = []
        for place, source in enumerate(order):
            token, confidence, when = answer[source] if source >= 0 else (mask_id, np.nan, -1)
            if token == mask_id and after[place] != mask_id and np.isfinite(score[source]):
                confidence, when = score[source], step
            now.append((int(after[place]), confidence, when))
        answer = now
    tokens, confidence, when = map(np.asarray, zip(*answer, strict=True))
    end = int(out.stats.length[0])
    np.testing.assert_array_equal(out.tokens[0, 9 : 9 + end], tokens[:end])
    np.testing.assert_allclose(last.confidence[0, 9 : 9 + end], confidence[:end], atol=1e-6)
    np.testing.assert_array_equal(out.logprobs.decoded_at[0, 9 : 9 + end], when[:end])
    np.testing.assert_allclose(
        np.exp(out.logprobs.log_prob[0, 9 : 9 + end])[when[:end] >= 0],
        confidence[:end][when[:end] >= 0],
        atol=1e-5,
    )


def test_streams_and_many_requests_grow_as_single_ones_do():
    model = model_of("llada")
    asked = [prompts(model, (n,), seed)[0][0].tolist() for n, seed in ((9, 0), (6, 1), (4, 2))]
    single = [dj.generate(model, [ids], **SHAPE, policy=UNDER[2]) for ids in asked]
    for index, out in dj.generate_many(model, asked, slots=2, **SHAPE, policy=UNDER[2]):
        np.testing.assert_array_equal(np.asarray(out.tokens)[0, -30:], single[index].tokens[0, -30:])
        assert_same_stats(out.stats, single[index].stats)
    seen = list(dj.stream(model, [asked[0]], every=2, logprobs=0, **SHAPE, policy=UNDER[2]))
    np.testing.assert_array_equal(seen[-1].output.tokens, single[0].tokens)
    ends = [int((one.tokens[0] == model.spec.mask_id).sum()) for one in seen]
    assert max(ends) > ends[0], "masks appear while the answer grows"
    unmasked = (seen[-1].logprobs.decoded_at >= 0).sum()
    assert sum(int(one.decoded.sum()) for one in seen) == unmasked, "what moves is not unmasked again"
    assert ends[-1] == 0


def test_pictures_show_the_answer_as_it_grows():
    model = model_of("llada")
    out = dj.generate(model, prompts(model, (9, 6))[0], trace=True, **SHAPE)
    for sequence in range(2):
        length, recording = np.asarray(out.trace.length)[:, sequence], Recording.of(out.trace, sequence)
        end = 9 + length.max()
        assert recording.tokens.shape[1] == end
        absent = recording.tokens == ABSENT
        np.testing.assert_array_equal(absent.sum(axis=1), length.max() - length[: len(absent)])
        np.testing.assert_array_equal(recording.to_fill, np.arange(9, end))
        np.testing.assert_array_equal(
            recording.tokens[-1, : 9 + length[-1]], out.tokens[sequence, : 9 + length[-1]]
        )
        assert not (recording.computed & absent[1:] & ~recording.read).any()
        page = out.to_html(sequence=sequence)
        assert '"-3":["",false]' in page
        assert '"insertions":' in page
    dj.show(out, sequence=1)


def test_activations_are_those_of_what_exists_of_an_answer():
    model, (prompt, mask) = model_of("dream"), prompts(tiny("dream"), (9, 6))
    out = dj.generate(model, prompt, prompt_mask=mask, trace=True, **SHAPE)
    seen = dj.capture(model, out, "residual", steps=[0, 5, 9], prompt_mask=mask, chunk=2)
    for index, step in enumerate(seen.steps):
        for sequence, first in enumerate((0, 3)):
            exist = slice(first, int(out.trace.end[step, sequence]))
            assert np.flatnonzero(seen.valid[index, sequence]).tolist() == [*range(exist.start, exist.stop)]
            alone = dj.hidden_states(model, out.trace.tokens[step, sequence, exist][None])[:, 0]
            np.testing.assert_allclose(seen.residual[index, :, sequence, exist], alone, atol=1e-4)
    with pytest.raises(ValueError, match="run has answers that grew"):
        dj.trajectory_log_probs(model, out, prompt_mask=mask)


def test_ends_and_stops_do_not_change_what_comes_before_them():
    model, prompt = model_of("llada"), prompts(tiny("llada"), (9,))[0]
    whole = dj.generate(model, prompt, **SHAPE)
    early = dj.generate(model, prompt, stop_at_eos=True, **SHAPE)
    answer = np.asarray(whole.tokens)[0, 9:]
    first = int(np.argmax(answer == model.spec.eos_id))
    np.testing.assert_array_equal(early.tokens[0, 9 : 9 + first + 1], answer[: first + 1])
    assert early.stats.nfe[0] <= whole.stats.nfe[0]
    token = int(answer[first // 2])
    stopped = np.asarray(dj.generate(model, prompt, stop=[[token]], **SHAPE).tokens)[0, 9:]
    before = answer.tolist().index(token)
    np.testing.assert_array_equal(stopped[:before], answer[:before])
    assert (stopped[before:] == model.spec.eos_id).all()


def test_an_answer_that_was_to_grow_beyond_its_maximum_says_so():
    model, prompt = model_of("llada"), prompts(tiny("llada"), (9, 6))[0]
    with pytest.warns(LengthWarning, match=r"sequences \[0, 1\] of 2 were to grow beyond max_length"):
        out = dj.generate(model, prompt, length=4, max_length=8, block=4, sampler=DAEDAL(grow_below=1.0))
    np.testing.assert_array_equal(out.stats.wanted_more, [True, True])
    np.testing.assert_array_equal(out.stats.length, [8, 8])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(max_length=None),
            "max_length=None must be a number with DAEDAL, whose answers grow from length=6",
        ),
        (dict(max_length=5), "max_length=5 must be at least length=6"),
        (dict(max_length=0), "max_length=0 must be a whole number of at least 1"),
        (dict(max_length=40, prompt=[[1] * 70]), r"max_length=40 must be at most 30: a prompt of 70 tokens"),
        (
            dict(sampler=Threshold()),
            "max_length=30 is not supported by Threshold: its answers have one length",
        ),
        (dict(suffix=[1]), r"suffix=\[1\] is not supported with max_length=30: the text after"),
        (dict(forbid=[57]), "forbid and suppress_tokens must not hold the end-of-text, 57, which DAEDAL"),
        (dict(steps=8), "steps=8 is not supported with max_length=30: the number of steps"),
        (dict(block=dj.Sliding(4)), r"block=Sliding.* is not supported with max_length=30: blocks have one"),
        (dict(allow=[[1]] * 6), "allow=.* is not supported with max_length=30: sets of tokens belong"),
        (dict(constraints=[dj.samplers.OneOf(0, [[1]])]), "constraints=.* not supported with max_length=30"),
        (
            dict(model="sdar"),
            "max_length=30 is not supported by sdar: .*another sampler, in generate with stop",
        ),
        (
            dict(policy=policies.SparseDLLM()),
            "max_length=30 is not supported by SparseDLLM: what it has stored",
        ),
        (dict(policy=Lazy()), "max_length=30 is not supported by Lazy: what it has stored"),
        (dict(policy=policies.SubBlockCache()), "max_length=30 is not supported by SubBlockCache: what it"),
        (dict(policy=policies.DKVDecode()), "max_length=30 is not supported by DKVDecode: what it"),
    ],
)
def test_options_without_meaning_for_growing_answers_raise(options, message):
    model = tiny(options.pop("model", "llada")).replace_spec(positions=100)
    prompt = options.pop("prompt", [[1, 2, 3]])
    with pytest.raises(ValueError, match=message):
        dj.generate(model, prompt, **SHAPE | options)


def test_options_that_daedal_cannot_have_are_refused():
    for name, value in (
        ("cfg_scale", 1.0), ("logits_eos_inf", True), ("confidence_eos_eot_inf", True),
        ("allow_mask_token", True), ("early_commit", dj.samplers.EarlyCommit()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}=.* is not supported by DAEDAL"):
            DAEDAL(**{name: value})
    with pytest.raises(ValueError, match="DAEDAL"):
        dj.generate(tiny("llada"), [[1]], length=6, max_length=30, block=5, sampler=FreeDave(SAMPLER))
    with pytest.raises(ValueError, match=r"sampler=DAEDAL\(\) is not supported by infill"):
        dj.infill(tiny("llada"), [[1, tiny("llada").spec.mask_id]], sampler=SAMPLER)


def test_steps_are_as_wide_as_the_answers_have_become():
    """Steps that compute all of a short answer run a quarter or half of the canvas."""
    model, sampler = tiny("llada"), DAEDAL(high=0.0, expansion=60, checked=2, insert_below=0.0)
    options = dict(length=60, max_length=600, block=60, sampler=sampler, policy=policies.DualCache())
    whole = dj.generate(model, [[1, 2, 3]], widths=(60,), **options)
    out = dj.generate(model, [[1, 2, 3]], trace=True, **options)
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    counts = np.asarray(out.trace.computed).sum((1, 2))
    assert counts[:4].tolist() == [63, 123, 183, 243]
    ran = [next(width for width in (153, 303, 603) if count <= width) for count in counts]
    assert out.stats.executed_tokens.tolist() == [sum(ran)]

    # Exact decoding computes everything that exists, `PrefixCache` does when a block begins.
    for policy in (policies.Policy(), policies.PrefixCache()):
        own = options | dict(policy=policy)
        out = dj.generate(model, [[1, 2, 3]], trace=True, **own)
        whole = dj.generate(model, [[1, 2, 3]], widths=(), **own)
        np.testing.assert_array_equal(out.tokens, whole.tokens)
        assert whole.stats.executed_tokens.tolist() == [603 * int(whole.stats.nfe[0])]
        counts = np.asarray(out.trace.computed).sum((1, 2))
        widths = (*prepare(model, [[1, 2, 3]], **own).plan.widths, 603)
        assert {153, 303} < set(widths)
        ran = [next(width for width in widths if count <= width) for count in counts]
        assert out.stats.executed_tokens.tolist() == [sum(ran)]


IDS = {"llada": (8, 11), "dream": (11, 21)}  # end-of-text and expand token: those that tiny models predict
UNPADDED, KEPT = dict(pad_eos_to_right=False), dict(delete_eos=False)
MOST = 10  # tokens that may take the place of a template's masks


def templates(family: str) -> tuple[dj.Model, list[list[int]]]:
    """A model whose end-of-text is predicted, and templates with two places to fill and with one."""
    model, mask = tiny(family).replace_spec(eos_id=IDS[family][0]), tiny(family).spec.mask_id
    long, short = (prompts(model, (n,), seed)[0][0].tolist() for n, seed in ((9, 0), (6, 1)))
    two = [*long[:5], *[mask] * 3, *long[5:], *[mask] * 4, IDS[family][0], mask, long[0]]
    return model, [two, [*short[:3], *[mask] * 5, *short[3:]]]


def filled_by_hand(model: dj.Model, template: list[int], sampler: DreamOn) -> tuple[list[int], int, int, int]:
    """A template filled over Python lists, with its forward passes, expansions and removals."""
    mask, eos, spec = model.spec.mask_id, model.spec.eos_id, model.spec
    tokens, given = list(template), [token != mask for token in template]
    largest, budget, passes, removed = len(template) + MOST - template.count(mask), MOST, 0, 0
    while mask in tokens:
        passes += 1
        # Of one length, so that one program serves all steps.
        padded, valid = np.full((2, 1, 30), eos), np.arange(30)[None] < len(tokens)
        padded[0, 0, : len(tokens)] = tokens
        logits = np.asarray(dj.forward(model, padded[0], valid), np.float64)[0]
        logits = np.concatenate([logits[:1], logits[:-1]]) if spec.shifted else logits
        if len(tokens) == largest or budget == 0:
            logits[:, sampler.expand] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        score = np.where(
            [*(token == mask for token in tokens)], (p * np.log(p + 1e-10)).sum(-1)[: len(tokens)], -np.inf
        )
        at = int(score.argmax())
        logits[:, mask] = -np.inf
        token = int(logits[at].argmax())
        if token == sampler.expand:
            budget -= 1
            tokens.insert(at + 1, mask)
            given.insert(at + 1, False)
            continue
        tokens[at], new = token, {at}
        if sampler.pad_eos_to_right:
            ended = False
            for i, own in enumerate(given):
                ended = not own and (ended or tokens[i] == eos)
                if ended and tokens[i] == mask:
                    tokens[i] = eos
                    new.add(i)
        if sampler.delete_eos:
            stays = [i for i in range(len(tokens)) if i not in new or tokens[i] != eos]
            removed += len(tokens) - len(stays)
            tokens, given = [tokens[i] for i in stays], [given[i] for i in stays]
    return tokens, passes, MOST - budget, removed


@matrix(
    "family, switches", FAMILIES, ({}, UNPADDED, KEPT), today=[("llada", {}), ("dream", {}), ("llada", KEPT)]
)
def test_templates_grow_and_shrink_as_they_do_by_hand(family, switches):
    """Both templates of a batch, which equals its sequences alone."""
    model, both = templates(family)
    sampler = DreamOn(IDS[family][1], **switches)
    out = dj.infill(model, both, max_length=MOST, sampler=sampler, trace=True)
    stats, widest = out.stats, max(map(len, both))
    for sequence, template in enumerate(both):
        tokens, passes, expansions, removed = filled_by_hand(model, template, sampler)
        begins = widest - len(template)
        answer = np.asarray(out.tokens)[sequence, begins:]
        assert answer[: len(tokens)].tolist() == tokens
        assert (answer[len(tokens) :] == model.spec.eos_id).all()
        counts = (stats.nfe, stats.length, stats.insertions, stats.removed_tokens)
        assert [int(a[sequence]) for a in counts] == [passes, len(tokens), expansions, removed]
        lengths = np.asarray(out.trace.length)[: passes + 1, sequence]
        assert (lengths[0], lengths[-1]) == (len(template), len(tokens))
        assert np.asarray(out.trace.removed)[:, sequence].sum() == removed
    assert sum(np.asarray(stats.insertions)) > 0 or switches == KEPT
    assert (sum(np.asarray(stats.removed_tokens)) > 0) == sampler.delete_eos


def test_a_template_whose_last_masks_are_removed_is_done_without_another_pass():
    model, sampler = tiny("dream").replace_spec(eos_id=21), DreamOn(16)
    template = templates("dream")[1][1]
    out = dj.infill(model, [template], max_length=MOST, sampler=sampler, trace=True)
    assert np.asarray(out.trace.removed)[-1].sum() == 5
    assert out.stats.nfe[0] == filled_by_hand(model, template, sampler)[1] == 3


@matrix("policy, family", UNDER, FAMILIES, today=[(UNDER[2], "llada"), (UNDER[1], "dream")])
def test_templates_in_blocks_grow_under_caches_as_they_do_alone(policy, family):
    model, both = templates(family)
    options = dict(max_length=MOST, block=4, sampler=DreamOn(IDS[family][1]), policy=policy, trace=True)
    batch = dj.infill(model, both, **options)
    for sequence, template in enumerate(both):
        alone, begins = dj.infill(model, [template], **options), max(map(len, both)) - len(template)
        end = begins + int(alone.stats.length[0])
        np.testing.assert_array_equal(batch.tokens[sequence, begins:end], alone.tokens[0, : end - begins])
        assert not (np.asarray(alone.tokens) == model.spec.mask_id).any()
        assert_same_stats(batch.stats, alone.stats, sequence)
    assert (np.asarray(batch.stats.insertions) > 0).any()
    assert (np.asarray(batch.stats.removed_tokens) > 0).any()


@matrix("family, alg", FAMILIES, ("entropy", "topk_margin", "maskgit_plus"), today=[("dream", "topk_margin")])
def test_without_its_two_tokens_dreamon_unmasks_the_most_confident_mask(family, alg):
    model, both = templates(family)
    expand, named = IDS[family][1], {"maskgit_plus": "prob", "topk_margin": "margin", "entropy": "entropy"}
    never = DreamOn(expand, alg=alg, pad_eos_to_right=False, delete_eos=False)
    ours = dj.infill(model, both, max_length=MOST, sampler=never, forbid=[expand], trace=True)
    plain = dj.infill(model, both, sampler=Confidence(alg=named[alg]), forbid=[expand], trace=True)
    width = max(map(len, both))
    np.testing.assert_array_equal(ours.tokens[:, :width], plain.tokens)
    np.testing.assert_array_equal(ours.trace.tokens[:, :, :width], plain.trace.tokens)
    assert not np.asarray(ours.stats.wanted_more).any()


def test_pictures_show_a_template_that_grows_and_shrinks():
    model, both = templates("llada")
    out = dj.infill(model, both, max_length=MOST, sampler=DreamOn(IDS["llada"][1]), trace=True)
    with pytest.warns(LengthWarning, match=r"sequences \[1\] of 2 were to grow beyond max_length"):
        dj.infill(model, both, max_length=MOST, sampler=DreamOn(IDS["llada"][1]))
    for sequence in range(2):
        end, recording = np.asarray(out.trace.end)[:, sequence], Recording.of(out.trace, sequence)
        absent = recording.tokens == ABSENT
        np.testing.assert_array_equal(absent.sum(axis=1), end.max() - end[: len(absent)])
        first = int(np.argmax(recording.tokens[0] == model.spec.mask_id))
        masks = np.flatnonzero(recording.tokens[0] == model.spec.mask_id)
        np.testing.assert_array_equal(
            recording.to_fill, np.arange(first, end.max()) if absent.any() else masks
        )
        # Every step of `Policy()` computes all that exists: what it computed moves with its positions.
        assert (recording.computed | absent[1:] | (recording.tokens[1:] == model.spec.mask_id))[
            :, first:
        ].all()
        assert not (recording.computed & absent[1:]).any()
        assert '"removed_tokens":' in out.to_html(sequence=sequence)
    dj.show(out)


def test_pictures_tell_moved_tokens_from_unmasked_ones():
    model, ids = tiny("llada").replace_spec(eos_id=8), prompts(tiny("llada"), (8,))[0][0].tolist()
    template = [*ids[:4], mask := model.spec.mask_id, *ids[4:]]
    expand = int(np.asarray(dj.forward(model, [template]))[0, 4].argmax())
    out = dj.infill(model, [template], max_length=10, sampler=DreamOn(expand), trace=True, logprobs=0)
    assert out.trace.inserted[0, 0] == 4, "the first step only moves what follows the mask"
    grown = dj.generate(model_of("llada"), [ids], trace=True, logprobs=0, **SHAPE)
    for of in (out, grown):
        recording = Recording.of(of.trace, 0)
        assert recording.mask_id == mask
        at, score = (array[-1] for array in recording.unmasked)
        end = len(at) - (0 if of is out else SAMPLER.checked // 2)  # end-of-texts that growth appended
        np.testing.assert_array_equal(at[:end], of.logprobs.decoded_at[0, :end] + 1)
        known = (at > 0) & (np.arange(len(at)) < end)
        if of is grown:
            np.testing.assert_allclose(
                score[known], np.exp(of.logprobs.log_prob[0, : len(at)][known]), atol=1e-5
            )
    assert recording.decoded_at.max() == recording.steps
    assert '"source":[' in out.to_html()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_length=None), "max_length=None must be a number with DreamOn, which may expand"),
        (dict(max_length=4), "max_length=4 must be at least 5: a template has that many masks"),
        (dict(max_length=60), "max_length=60 must be at most 54: a template and what it grows by must fit"),
        (dict(sampler=Threshold()), "max_length=10 is not supported by Threshold: each mask becomes one"),
        (dict(sampler=SAMPLER), r"sampler=DAEDAL\(\) is not supported by infill"),
        (dict(steps=8), "steps=8 is not supported with max_length=10: the number of steps"),
        (dict(block=dj.Sliding(4)), "block=Sliding.* is not supported by infill: its blocks begin"),
        (dict(allow=[[1]] * 11), "allow=.* is not supported with max_length=10: sets of tokens belong"),
        (dict(constraints=[dj.samplers.OneOf(0, [[1]])]), "constraints=.* not supported with max_length=10"),
        (dict(model="sdar"), "max_length=10 is not supported by sdar: it decodes block after block"),
        (dict(policy=policies.SparseDLLM()), "max_length=10 is not supported by SparseDLLM: what it has"),
        (dict(policy=policies.DKVDecode()), "max_length=10 is not supported by DKVDecode: what it has"),
        (dict(sampler=DreamOn()), r"expand=151667 must be an id of the vocabulary \[0, 61\)"),
        (dict(sampler=DreamOn(59)), r"expand=59 must be an id .*, neither the mask's \(59\) nor"),
        (dict(sampler=DreamOn(8)), "expand=8 must be an id .* nor an end-of-text"),
    ],
)
def test_options_without_meaning_for_growing_templates_raise(options, message):
    model = tiny(name := options.pop("model", "llada"))
    if name == "llada":
        model = model.replace_spec(positions=60, eos_id=8)
    template = [1, 2, 3, *[model.spec.mask_id] * 5, 4, 5, 6]
    with pytest.raises(ValueError, match=message):
        dj.infill(model, [template], **dict(max_length=10, sampler=DreamOn(11)) | options)


def test_options_that_dreamon_cannot_have_are_refused():
    for name, value in (
        ("cfg_scale", 1.0), ("delay_eos", True), ("allow_mask_token", True),
        ("early_commit", dj.samplers.EarlyCommit()),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}=.* is not supported by DreamOn"):
            DreamOn(**{name: value})
    with pytest.raises(ValueError, match=r"sampler=DreamOn.* is not supported by FreeDave"):
        FreeDave(DreamOn())
    model, mask = tiny("llada"), tiny("llada").spec.mask_id
    with pytest.raises(ValueError, match=r"sampler=DreamOn\(\) is not supported here: it fills the masks"):
        dj.generate(model, [[1]], length=6, max_length=30, sampler=DreamOn(11))
    with pytest.raises(ValueError, match="max_length=4 is not supported where infill is traced"):
        jax.jit(lambda t: dj.infill(model, t, max_length=4, sampler=DreamOn(11)).tokens)(
            np.array([[1, mask]])
        )
