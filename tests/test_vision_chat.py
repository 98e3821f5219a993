"""Prompts with images through `chat` and `generate`; stop sequences and ids that are never decoded."""

import dataclasses
import itertools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.engine.features.stops import StopIds
from dllm_jax.state.canvas import Stop
from dllm_jax.testing.runs import assert_same_run, of_sequence
from dllm_jax.vision import Pad, Processor
from tests import llada_v, refuses, run_page
from tests.models import canvas, tiny
from tests.policy_cases import EVERY, KEY, matrix, suited
from tests.test_prompt_embeds import prompts
from tests.test_vision import picture

ONE = [{"role": "user", "content": "<image>\nWhat?", "images": [picture(70, 25)]}]
TWO = [{"role": "user", "content": "<image> <image>\nA?", "images": [picture(20, 30), picture(31, 30)]}]
TEXT = [{"role": "user", "content": "Hm?"}]


@pytest.fixture(scope="module")
def model(llada_v_path):
    return dj.load(llada_v_path)


@pytest.fixture(scope="module")
def processor(llada_v_path):
    return Processor.load(llada_v_path, at_once=4)


@matrix("policy", EVERY, today=[(policies.DualCache,)])
def test_a_batch_of_prompts_with_different_images_equals_them_alone(model, processor, policy):
    options = dict(length=8, block=4, policy=policy, sampler=suited(policy, samplers.Confidence()))
    options |= dict(key=KEY, trace=True)
    made = processor.encode(model, [ONE, TWO, TEXT])
    batch = dj.generate(model, made.ids, prompt_mask=made.mask, prompt_embeds=made.embeds, **options)
    chosen = (0, 2) if not options["sampler"].draws else ()  # with images, after padding; without
    for i in chosen:
        one = processor.encode(model, [[ONE, TWO, TEXT][i]])
        alone = dj.generate(model, one.ids, prompt_embeds=one.embeds, **options)
        assert_same_run(of_sequence(batch.trace, i, one.ids.shape[1] + 8), alone.trace, computed=True)
        score = np.asarray(of_sequence(batch.trace, i, 8).score)
        np.testing.assert_allclose(score, np.asarray(alone.trace.score)[..., -8:], atol=1e-4)


def test_positions_are_those_of_the_images_and_a_rung_is_padded_on_the_left(model, processor):
    made = processor.encode(model, [TWO, TEXT], dj.buckets.Ladder((300, 400)))
    assert made.ids.shape == made.mask.shape == (2, 300) == made.embeds.shape[:2]
    assert (made.ids == dj.EMBEDS_PLACEHOLDER).sum(axis=1).tolist() == [32, 0]
    one = processor.encode(model, [ONE])
    size = len(processor.one.merge((70, 25), model.spec.vision).source)
    assert (one.ids == dj.EMBEDS_PLACEHOLDER).sum() == size
    assert processor.encode(model, [TEXT]).embeds is None
    refuses(r"conversations=\[\] must hold at least one", processor.encode, model, [])
    longer = dataclasses.replace(processor, several=Pad(newline=True), drop_first_id=False)
    assert longer.encode(model, [TWO]).ids.shape[1] == processor.encode(model, [TWO]).ids.shape[1] + 2 + 2
    with pytest.raises(ValueError, match=r"positions; at most longest=200"):
        dataclasses.replace(processor, longest=200).encode(model, [ONE])


def test_a_length_that_is_none_is_refused_with_its_file(llada_v_path, tmp_path):
    folder = shutil.copytree(llada_v_path, tmp_path / "none")
    config = json.loads((folder / "config.json").read_text()) | {"tokenizer_model_max_length": 0}
    (folder / "config.json").write_text(json.dumps(config))
    refuses(r"config\.json.*tokenizer_model_max_length=0 must be", Processor.load, folder)


def test_chat_answers_with_text_and_never_with_a_header(model, processor):
    options = dict(length=8, block=4, policy=policies.DualCache())
    both = dj.chat(model, processor, [ONE, TEXT], **options)
    assert [type(answer) for answer in both] == [str, str]
    assert dj.chat(model, processor, ONE, buckets=dj.buckets.Ladder((320,)), **options) == both[0]
    assert set(processor.suppress_tokens) == {256, 257, 258, 259}
    stopped = dj.chat(model, processor, ONE, stop=[both[0][1]], **options) if len(both[0]) > 1 else ""
    assert both[0].startswith(stopped)
    for last in both[0][-1:]:
        assert dj.chat(model, processor, ONE, stop=[last], **options) == both[0].split(last)[0]
    refuses("stop='x' must be a list of texts", dj.chat, model, processor, ONE, stop="x", **options)


def test_ids_that_are_suppressed_are_never_decoded_and_count_for_nothing():
    model = tiny("llada")
    ids, mask = prompts(model)
    options = dict(prompt_mask=mask, length=8, trace=True)
    plain = dj.generate(model, ids, **options)
    taken = tuple(sorted({int(i) for i in np.asarray(plain.tokens)[:, -8:].ravel()}))
    ours = dj.generate(model, ids, sampler=samplers.Confidence(suppress_tokens=taken), **options)
    assert not np.isin(np.asarray(ours.tokens)[:, -8:], taken).any()

    # The first step's confidences, from logits: the softmax over what is left.
    tokens = jnp.asarray(np.asarray(ours.trace.tokens)[0])
    valid = jnp.asarray(np.pad(mask, ((0, 0), (0, 8)), constant_values=True))
    logits = np.array(dj.forward(model, tokens, valid))
    logits[..., list(taken)] = -np.inf
    chance = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chance /= chance.sum(axis=-1, keepdims=True)
    chance[..., model.spec.mask_id] = 0
    np.testing.assert_allclose(ours.trace.score[0, :, -8:], chance.max(axis=-1)[:, -8:], atol=1e-5)
    with pytest.raises(ValueError, match=r"suppress_tokens holds 61, outside the vocabulary \[0, 61\)"):
        dj.generate(model, ids, sampler=samplers.Confidence(suppress_tokens=(61,)), **options)


STOPPED = (samplers.Confidence(), samplers.Threshold(0.2))
TODAY = [(policies.DualCache, STOPPED[1])]


@matrix("policy, sampler", EVERY, STOPPED, today=TODAY)
def test_a_stop_ends_its_sequence_and_no_other(policy, sampler):
    model = tiny("llada")
    ids, mask = prompts(model)
    options = dict(prompt_mask=mask, length=8, block=4, policy=policy, sampler=suited(policy, sampler))
    options |= dict(key=KEY, trace=True)
    plain = dj.generate(model, ids, **options)
    answers, p = np.asarray(plain.trace.tokens)[:, :, ids.shape[1] :], ids.shape[1]

    # A token that the first sequence has and the second has not.
    token = next(int(t) for t in answers[-1, 0, 1:] if t not in answers[-1, 1])
    ours = dj.generate(model, ids, stop=[[token]], **options)
    np.testing.assert_array_equal(ours.tokens[1], plain.tokens[1])
    found = np.argmax((answers[:, 0] == token).any(axis=1))  # after this step
    traced, end = np.asarray(ours.trace.tokens)[:, 0, p:], answers.shape[-1]
    np.testing.assert_array_equal(traced[: found + 1], answers[: found + 1, 0])

    # From then on nothing after the leftmost place is decoded, which may move to the left.
    for before, after in itertools.pairwise(traced):
        if end < len(after):
            np.testing.assert_array_equal(after[end:], before[end:])
        end = min(end, *np.flatnonzero(after == token), len(after))
    assert not (traced[-1, :end] == model.spec.mask_id).any()
    absent = next(i for i in range(50) if i not in np.asarray(plain.tokens))
    never = [[absent], [int(plain.tokens[0, -8])] * 9]
    np.testing.assert_array_equal(dj.generate(model, ids, stop=never, **options).tokens, plain.tokens)
    final = np.asarray(ours.tokens)[0, p:]
    np.testing.assert_array_equal(final[:end], traced[-1, :end])
    assert (final[end:] == model.spec.eos_id).all()
    assert ours.stats.nfe[0] <= plain.stats.nfe[0]
    assert ours.stats.answer_tokens[0] <= end


def test_of_several_stops_the_first_of_the_list_counts():
    mask_id = tiny("llada").spec.mask_id
    now = canvas([[True] * 8], prompt=2)
    find = lambda tokens, known, *stop: int(
        StopIds(stop)
        .look(
            dataclasses.replace(
                now, tokens=jnp.asarray([tokens]), stop=Stop(jnp.asarray([known], jnp.int32))
            ),
            final=True,
        )
        .stop.position[0]
    )
    tokens = [7, 8, 3, 5, mask_id, 4, 3, 5]
    assert find(tokens, 8, (5,), (3,)) == 3
    assert find(tokens, 8, (4, 3), (3,)) == 5
    assert find(tokens, 8, (9,), (3, 5)) == 2
    assert find(tokens, 8, (7,), (8,)) == 8, "the prompt is not searched"
    assert find(tokens, 6, (3,), (5,)) == 2
    assert find(tokens, 6, (9,), (3,)) == 6, "only the first of the list moves a stop"
    assert find(tokens, 8, (3, 5, 9), (1,) * 9) == 8


def test_values_that_are_no_stop_are_refused(unannotated):
    for stop in ("x", [[]], [3], [["a"]], [[61]], [[59]], 3):
        refuses("stop=", dj.generate, tiny("llada"), [[1, 2]], length=4, stop=stop)


def test_the_page_runs_as_printed(llada_v_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(64, 48).save("chart.png")
    picture(30, 30).save("cat.png")
    words = {"GSAI-ML/LLaDA-V": str(llada_v_path), "vocab=126349": f"vocab={llada_v.VOCAB}"}
    names = run_page("how-to/vision.md", words)
    assert isinstance(names["answer"], str)
    assert names["soft"].tokens.shape[1] == names["prompt"].shape[1] + 32
