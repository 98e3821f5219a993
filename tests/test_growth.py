"""Answers that grow (DAEDAL): limits, batches, what moves along, and refusals. Recordings: test_goldens."""

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies
from dllm_jax.decoding.report import LengthWarning
from dllm_jax.decoding.watch.recording import ABSENT, Recording
from dllm_jax.samplers import DAEDAL, FreeDave, Threshold
from dllm_jax.testing.runs import assert_same_run, assert_same_stats, of_sequence
from tests.models import FAMILIES, prompts, tiny
from tests.policy_cases import matrix

EOS = {"llada": 18, "dream": 16}  # a token that the tiny model predicts often
UNDER = policies.Policy(), policies.PrefixCache(), policies.DualCache()
SAMPLER = DAEDAL(0.3, 0.2, grow_below=0.04, insert_below=0.9, expansion=3, checked=6)
SHAPE = dict(length=6, max_length=30, block=5, sampler=SAMPLER)
pytestmark = pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.LengthWarning")


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
    seen = list(dj.stream(model, [asked[0]], every=2, **SHAPE, policy=UNDER[2]))
    np.testing.assert_array_equal(seen[-1].output.tokens, single[0].tokens)
    ends = [int((one.tokens[0] == model.spec.mask_id).sum()) for one in seen]
    assert max(ends) > ends[0], "masks appear while the answer grows"
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
        (dict(steps=8), "steps=8 is not supported with max_length=30: the number of steps"),
        (dict(block=dj.Sliding(4)), r"block=Sliding.* is not supported with max_length=30: blocks have one"),
        (dict(allow=[[1]] * 6), "allow=.* is not supported with max_length=30: sets of tokens belong"),
        (dict(constraints=[dj.samplers.OneOf(0, [[1]])]), "constraints=.* not supported with max_length=30"),
        (dict(model="sdar"), "max_length=30 is not supported by sdar: it decodes block after block"),
        (
            dict(policy=policies.SparseDLLM()),
            "max_length=30 is not supported by SparseDLLM: what it has stored",
        ),
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
    """Steps of `DualCache` that compute all of a short answer run a quarter or half of the canvas."""
    model, sampler = tiny("llada"), DAEDAL(high=0.0, expansion=60, checked=2, insert_below=0.0)
    options = dict(length=60, max_length=600, block=60, sampler=sampler, policy=policies.DualCache())
    whole = dj.generate(model, [[1, 2, 3]], widths=(60,), **options)
    out = dj.generate(model, [[1, 2, 3]], trace=True, **options)
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    counts = np.asarray(out.trace.computed).sum((1, 2))
    assert counts[:4].tolist() == [63, 123, 183, 243]
    ran = [next((width for width in (153, 303) if count <= width), count) for count in counts]
    assert out.stats.executed_tokens.tolist() == [sum(ran)]
