"""Generations that are watched while they run: the same values as at once, in pieces of one program."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.features.assembly import in_order
from dllm_jax.engine.features.logprobs import Confidences
from dllm_jax.engine.pieces import begin_pieces, resume
from dllm_jax.engine.stats import NonFiniteWarning
from dllm_jax.testing.checks import SEVERAL_AT_ONCE
from tests.models import FAMILIES, prompts, tiny
from tests.policy_cases import EVERY, EXHAUSTIVE, KEY, daily, matrix, short, suited

LAYOUT = dict(length=12, block=4)


def assert_same(ours: dj.Output | None, theirs: dj.Output):
    """Every bit of tokens, statistics and trace."""
    assert ours is not None
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def assert_tells(snapshots: list[dj.Snapshot], out: dj.Output, prompt: np.ndarray):
    """Each snapshot shows the generation after its steps."""
    before, trace = np.asarray(out.trace.tokens)[0], jax.tree.map(np.asarray, out.trace)
    confidence = np.full(before.shape, np.nan, np.float32)
    steps = np.zeros(len(before), int)
    for snapshot in snapshots:
        assert (snapshot.steps >= steps).all()
        assert (snapshot.steps > steps).any()
        np.testing.assert_array_equal(snapshot.decoded, snapshot.tokens != before)
        for i, (first, last) in enumerate(zip(steps, snapshot.steps, strict=True)):
            for step in range(first, last):
                wrote = trace.tokens[step, i] != trace.tokens[step + 1, i]
                confidence[i] = np.where(wrote, trace.score[step, i], confidence[i])
            np.testing.assert_array_equal(snapshot.tokens[i], trace.tokens[last, i])
        np.testing.assert_array_equal(snapshot.confidence, confidence)
        places = np.nonzero(snapshot.decoded)[1] - prompt.shape[1]
        assert (places // LAYOUT["block"]).min() == snapshot.block, "others may be ahead of the slowest"
        before, steps = snapshot.tokens, snapshot.steps
    assert [s.output is None for s in snapshots] == [True] * (len(snapshots) - 1) + [False]


@pytest.mark.parametrize(
    ("sampler", "stop"),
    [
        (samplers.Threshold(0.3), []),
        (samplers.Threshold(0.3), [[40]]),
        (samplers.WINO(wide_in=0.02, narrow_out=0.3), []),
        (samplers.Edit(0.1, 0.05), []),
    ],
)
def test_settled_tokens_stay(sampler, stop):
    """Of samplers that revise tokens, only those of finished blocks; of stopped answers, those before it."""
    model, layout = tiny("llada"), dict(sampler=sampler, stop=stop, every=1, length=12, block=12)
    prompt, mask = prompts(model, (9, 5) * 12)
    for buckets in (None, dj.buckets.Ladder((16,))):
        *before, last = dj.stream(model, prompt, prompt_mask=mask, buckets=buckets, **layout)
        assert last.settled.tolist() == [21] * 24
        for snapshot in before:
            for tokens, end, final in zip(snapshot.tokens, snapshot.settled, last.tokens, strict=True):
                np.testing.assert_array_equal(tokens[:end], final[:end])
        assert any((snapshot.settled > 9).any() for snapshot in before)
        assert not np.isinf(last.confidence).any(), "replaced tokens have the confidence of the new one"


TWO = samplers.Confidence(), SEVERAL_AT_ONCE


@matrix("policy, sampler, family", EVERY, TWO, FAMILIES, today=[(policies.DualCache, TWO[1], "llada")])
def test_a_stream_has_the_bits_of_the_generation(policy, sampler, family):
    model = tiny(family)
    prompt, mask = prompts(model, (9, 5))
    options = dict(
        prompt_mask=mask, policy=policy, sampler=suited(policy, sampler), key=KEY, trace=True, **LAYOUT
    )
    sizes = begin_pieces._cache_size(), resume._cache_size()
    out = dj.generate(model, prompt, **options)
    by_block = list(dj.stream(model, prompt, **options))
    by_step = list(dj.stream(model, prompt, every=1, **options))
    by_two = list(dj.stream(model, prompt, every=2, **options))
    for snapshots in (by_block, by_two, by_step):
        assert_same(snapshots[-1].output, out)
        assert_tells(snapshots, out, prompt)
    assert [snapshot.block for snapshot in by_block] == [0, 1, 2]
    assert (np.diff([[0, 0], *(snapshot.steps for snapshot in by_step)], axis=0).max(axis=1) == 1).all()
    assert len(by_block) <= len(by_two) <= len(by_step)
    pieces = begin_pieces._cache_size() - sizes[0], resume._cache_size() - sizes[1]
    assert max(pieces) <= 1, "pieces of other lengths are other programs"


@pytest.mark.usefixtures("unannotated", "optimized")
def test_the_cache_is_written_in_place_from_piece_to_piece():
    """Donated, and never copied: neither in the loops nor on the way in and out."""
    model = tiny("llada")
    prompt, _ = prompts(model, (7, 7))
    request = prepare(model, prompt, policy=policies.DualCache(), **LAYOUT)
    arguments = (
        model,
        request.inputs,
        dataclasses.replace(request.plan, features=in_order((*request.plan.features, Confidences()))),
    )
    state = begin_pieces(*arguments)
    program = resume.lower(*arguments, state, np.int32(9)).compile()
    text, shape = program.as_text(), ",".join(map(str, state.cache.layers.k.shape))
    assert f"f32[{shape}]" in text, "the cache is not where this test looks for it"
    assert not re.findall(rf"= f32\[{shape}\]\S* copy(?:-start)?\(", text)
    assert program.memory_analysis().alias_size_in_bytes >= 2 * state.cache.layers.k.nbytes


@pytest.mark.parametrize(
    "policy", daily((policies.DualCache(), policies.EvictPrompt(budget=3)), policies.DualCache), ids=short
)
def test_embeddings_guidance_ends_and_suffixes_are_as_at_once(policy, capsys):
    model = tiny("llada")
    ids, mask = prompts(model, (9, 5))
    rows = np.random.default_rng(1).standard_normal((*ids.shape, model.spec.width), np.float32)
    prompt = np.where(mask & (np.arange(9) < 8), dj.EMBEDS_PLACEHOLDER, ids)
    options = dict(
        prompt_mask=mask, prompt_embeds=rows, policy=policy, suffix=[3, 1],
        sampler=samplers.Confidence(cfg_scale=0.5, temperature=0.7), key=KEY, stop_at_eos=True,
        trace=True, buckets=dj.buckets.Ladder((12,)), **LAYOUT,
    )  # fmt: skip
    plain = dj.generate(model, prompt, **options)
    stop = int(plain.tokens[0, 9 + 5])
    out = dj.generate(model, prompt, stop=[[stop]], **options)
    assert not np.array_equal(out.tokens, plain.tokens)
    snapshots = list(dj.stream(model, prompt, every=1, stop=[[stop]], **options))
    assert_same(snapshots[-1].output, out)
    assert_same(dj.generate(model, prompt, progress=True, stop=[[stop]], **options), out)

    # What follows the stop was decoded by no step; what was is told once.
    last, final = snapshots[-1], np.asarray(out.trace.tokens)[-1]
    np.testing.assert_array_equal(last.tokens, out.tokens)
    assert np.isnan(last.confidence[last.tokens != final]).all()
    told = np.sum([snapshot.decoded for snapshot in snapshots], axis=0)
    decoded = np.asarray(out.trace.tokens[0] == model.spec.mask_id) & (final != model.spec.mask_id)
    assert (told <= decoded).all()
    np.testing.assert_array_equal(told[last.tokens == final], decoded[last.tokens == final])
    capsys.readouterr()


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto][: 1 + EXHAUSTIVE], ids=str)
def test_a_stream_over_a_mesh_has_the_tokens_of_one_device(kind):
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5, 7))
    options = dict(prompt_mask=mask, policy=policies.DualCache(), trace=True, **LAYOUT)
    out = dj.generate(model, prompt, **options)
    with jax.set_mesh(jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)):
        whole = dj.generate(model, prompt, **options)
        *_, last = dj.stream(model, prompt, **options)
    np.testing.assert_array_equal(last.tokens, out.tokens)
    assert_same(last.output, whole)
    assert last.output.tokens.sharding.mesh == whole.tokens.sharding.mesh
    np.testing.assert_array_equal(last.output.stats.computed_tokens, out.stats.computed_tokens)


@pytest.mark.usefixtures("unannotated")
def test_generations_that_cannot_be_watched_are_refused_at_the_call():
    model = tiny("llada")
    prompt, _ = prompts(model, (7, 7))
    for options, message in (
        (dict(every=0), "every=0 must be"), (dict(every=1.5), "every=1.5 must be"),
        (dict(length=-1), "length=-1"), (dict(sampler=samplers.RandomOrder(temperature=1.0)), "pass key="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            dj.stream(model, prompt, **options)
    with pytest.raises(TypeError, match="progress"):
        dj.stream(model, prompt, progress=True)
    with pytest.raises(ValueError, match="inside of jit"):
        jax.jit(lambda prompt: dj.generate(model, prompt, progress=True, **LAYOUT))(prompt)
    with pytest.raises(ValueError, match="progress=1 must be"):
        dj.generate(model, prompt, progress=1)


def test_sequences_without_finite_logits_are_told_of_at_the_end():
    model = tiny("llada")
    params = model.params | {"norm": jax.tree.map(lambda a: a * np.nan, model.params["norm"])}
    broken = dj.Model(params, model.spec)
    prompt, _ = prompts(model, (7, 7))
    with pytest.warns(NonFiniteWarning, match=r"\[0, 1\]"):
        *_, last = dj.stream(broken, prompt, **LAYOUT)
    assert not last.decoded.any()
    assert np.isnan(last.confidence).all()
    with pytest.raises(FloatingPointError):
        list(dj.stream(broken, prompt, nonfinite="raise", **LAYOUT))


@pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.LengthWarning")
def test_a_bar_counts_tokens_and_changes_nothing(capsys):
    model = tiny("llada")
    prompt, mask = prompts(model, (9, 5))
    options = dict(prompt_mask=mask, policy=policies.DualCache(), trace=True, **LAYOUT)
    assert_same(dj.generate(model, prompt, progress=True, **options), dj.generate(model, prompt, **options))
    shown = capsys.readouterr()
    assert "24/24" in shown.err
    assert "12 steps" in shown.err
    assert shown.out == ""
    template = jax.numpy.full((1, 6), model.spec.mask_id).at[0, :2].set(3)
    filled = dj.infill(model, template, progress=True)
    assert_same(filled, dj.infill(model, template))
    np.testing.assert_array_equal(template[0], [3, 3, *[model.spec.mask_id] * 4])  # it is the caller's
    assert "4/4" in capsys.readouterr().err

    # An answer that grows has more tokens than masks at the beginning.
    sampler = samplers.DAEDAL(high=0.0, expansion=6, insert_below=0.0)
    growing = dict(length=6, max_length=30, block=6, sampler=sampler, progress=True)
    assert dj.generate(model, [[1, 2, 3]], **growing).stats.length.tolist() == [30]
    assert "30/30" in capsys.readouterr().err


def test_tokens_of_a_verified_draft_stay_while_the_next_one_is_made():
    options = dict(length=9, sampler=samplers.SelfSpeculation(block=3, threshold=0.3))
    parts, before = list(dj.stream(tiny("nemotron"), [[7, 8, 9], [5]], every=1, **options)), np.zeros(2, int)
    for part in parts[:-1]:
        assert np.all(part.settled >= before)
        before = part.settled
        for row, final, end in zip(part.tokens, parts[-1].tokens, part.settled, strict=True):
            np.testing.assert_array_equal(row[:end], final[:end])
    assert np.all(before > 6)
